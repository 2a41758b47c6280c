"""What the message of a data-dependent error says further: text, and back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from torch_fakeify.render.data_dependent import KnownOf, failed_condition, known_in

LINE = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=30)
CHECKS = st.lists(LINE.map(lambda text: f"torch._check({text})"), max_size=3).map(tuple)
SOME = st.one_of(st.just(""), LINE.filter(bool))


@given(
    st.builds(
        KnownOf,
        known=st.lists(LINE, max_size=3).map(tuple),
        more=st.integers(0, 99),
        nothing=SOME,
        checks=CHECKS,
        opposite=CHECKS,
        unnamed=SOME,
    ),
    st.sampled_from(["", "\n", "\n\nfrom user code:\n   File x\n  torch._check(n >= 0)\n"]),
)
@example(KnownOf(known=("and 3 more", "a"), opposite=("torch._check(u)",)), "\n\n")
def test_the_text_is_read_back(known: KnownOf, after: str) -> None:
    """Facts and checks come back as they were written, with torch's text before and after."""
    assert known_in(f"Could not guard\n  known: no\n{known.text()}{after}") == known


def test_other_messages_have_no_condition_and_no_facts() -> None:
    """Of other errors nothing is read."""
    assert known_in("It would follow with:\n  torch._check(n)") is None
    assert failed_condition("no kernel for aten.sort") is None


def test_the_condition_is_that_of_torchs_message() -> None:
    """The text up to the condition before replacement, or to the end of the line."""
    text = "Could not guard on data-dependent expression u0 <= 8 (unhinted: u0 <= s0).  (Size"
    assert failed_condition(text) == "u0 <= 8"
    assert failed_condition("data-dependent expression Eq(u0, 1)\nmore") == "Eq(u0, 1)"
