"""The parser of the command line: each command has a sentence, an example and its exit statuses."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from torch_fakeify._version import __version__
from torch_fakeify.errors import FakeifyError
from torch_fakeify.serialization.container import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Command = Callable[[argparse.Namespace], int]
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SHELLS = ("bash", "zsh", "tcsh")
_ALWAYS = "2 bad usage or a bad file; 130 interrupted."
_FIRST = """\
The first steps:
  torch-fakeify run SCRIPT.py         record what it compiles
  torch-fakeify show captures         list what was recorded
  torch-fakeify minify FILE           make a frame that fails small
  torch-fakeify doctor                see what works here"""


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, and leaves indented lines, which are commands, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002
        return "\n".join(
            line if line.startswith("  ") else textwrap.fill(line, width)
            for line in text.splitlines()
        )


class _Completion(argparse.Action):
    """Print the script by which a shell completes the commands and their options."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, values: Any, *_: Any
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(
                "shell completion needs the package shtab: pip install 'torch_fakeify[completion]'"
            )
        sys.stdout.write(f"{shtab.complete(parser, shell=values)}\n")
        parser.exit()


class _ModuleOfRun(argparse.Action):
    """``-m MODULE ARGS``, in place of the positional arguments, which are ``const``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        *_: object,
    ) -> None:
        if not values:
            parser.error("argument -m: expected MODULE")
        for action in self.const:
            action.required = False
        namespace.script, namespace.module, namespace.args = None, values[0], values[1:]


def make_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Make the parser of all commands, with what each of them calls with its arguments."""
    parser = argparse.ArgumentParser(
        prog="torch-fakeify",
        description="Record a torch.compile frame in one small file, and rebuild it anywhere.",
        epilog=f"{_FIRST}\n\n"
        f"Exit status: 0 done; 1 the thing checked does not hold; {_ALWAYS}\n"
        "`torch-fakeify COMMAND --help` has an example of each command.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"torch-fakeify {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=_SHELLS,
        metavar="SHELL",
        help=f"print the completion script of {', '.join(_SHELLS)}, which the shell then reads",
    )
    found = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_run, _add_show, _add_replay, _add_minify, _add_report, _add_issue, _add_fuzz,
        _add_fakes, _add_diff, _add_bisect, _add_doctor, _add_demo,
    ):  # fmt: skip
        add(found)
    for name, command in found.choices.items():
        command.set_defaults(command=commands[name], parser=command, parsers=found.choices)
    for name in ("show", "replay", "bisect", "diff", "fuzz", "fakes", "minify", "report", "issue"):
        found.choices[name].add_argument(
            "--trust",
            action="store_true",
            help="read a file that asks for more than a capture of its size needs, and set also those of "
            "its settings that could run or write something",
        )
    return parser


def _add(
    commands: _Commands,
    name: str,
    sentence: str,
    *,
    more: str = "",
    examples: Sequence[str],
    statuses: str,
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a command: its help has a sentence, more about it, and examples without the name of the program.

    ``statuses`` is the meaning of exit statuses 0 and 1, and of 2 where it is special.
    """
    lines = [f"  torch-fakeify {example}" for example in examples]
    title = "Example:" if len(lines) == 1 else "Examples:"
    always = "130 interrupted." if " 2 " in statuses else _ALWAYS
    return commands.add_parser(
        name,
        help=sentence,
        description=" ".join(filter(None, [f"{sentence[0].upper()}{sentence[1:]}.", more])),
        epilog="\n".join([title, *lines, "", f"Exit status: {statuses}; {always}"]),
        formatter_class=_Help,
        **options,
    )


# --- types of values ------------------------------------------------------------------------------


def _number(kind: Callable[[str], Any], expected: str, least: float = 0) -> Callable[[str], Any]:
    """Return a type of positive numbers of at least ``least``; ``expected`` is the text of its error."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not (0 < value < float("inf") and value >= least):
            raise argparse.ArgumentTypeError(f"{expected}; found {text!r}")
        return value

    return parse


_count = _number(int, "must be at least 1")
_seconds = _number(float, "must be a positive number of seconds")
_ratio = _number(float, "must be a ratio of at least 1", 1)
_mebibytes = _number(int, "must be a positive number of MiB")


def _backend(text: str) -> str:
    module, colon, attribute = text.partition(":")
    if colon:
        _check_dotted(text, module, attribute)
    return text


def _module(text: str) -> str:
    _check_dotted(text, text)
    return text


def _check_dotted(text: str, *names: str) -> None:
    is_file = names[0].endswith(".py")
    if is_file or not all(part.isidentifier() for name in names for part in name.split(".")):
        expected = "a module" if len(names) == 1 else "MODULE:ATTR"
        raise argparse.ArgumentTypeError(
            f"must be {expected}, in dotted names, not a file; found {text!r}"
        )


def _sizes(text: str) -> dict[str, int]:
    """Return sizes by name, from ``NAME=N,...`` or from the file of ``fuzz --save``."""
    from torch_fakeify.frames.inputs.size_names import parse_sizes

    try:
        return parse_sizes(text)
    except FakeifyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- options that several commands have -----------------------------------------------------------


def _flag(command: argparse._ActionsContainer, name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


_SHARED: Mapping[str, dict[str, Any]] = {
    "--backend": {
        "type": _backend,
        "metavar": "NAME|MODULE:ATTR",
        "help": "a Dynamo backend by its registered name, or a function of a module; {}",
    },
    "--import": {
        "action": "append",
        "type": _module,
        "default": [],
        "dest": "imports",
        "metavar": "MODULE",
        "help": "import it first, as one that registers a backend or operators; may be repeated. It is "
        "looked for in the current folder first",
    },
    "--python": {
        "action": "append",
        "default": [],
        "dest": "pythons",
        "metavar": "EXE",
        "help": "compile with this interpreter, which has its own torch; {}",
    },
    "--runs": {"type": _count, "metavar": "N", "help": "sizes; default: %(default)s"},
    "--seed": {"type": int, "default": 0, "metavar": "S", "help": "{}; default: 0"},
    "--sizes": {
        "type": _sizes,
        "default": {},
        "metavar": "NAME=N,...",
        "help": "to run it at, or the file that `fuzz --save` wrote; default: {}",
    },
    "--device": {"help": "put what was on an accelerator there, e.g. cpu"},
    "--timeout": {
        "type": _seconds,
        "default": 600.0,
        "metavar": "S",
        "help": "seconds {}; default: 600",
    },
    "--memory": {
        "type": lambda text: _mebibytes(text) << 20,
        "metavar": "MIB",
        "help": "{}",
    },
}
"""Options that several commands have; the help of each command has a text in place of ``{}``."""


def _shared(command: argparse.ArgumentParser, name: str, text: str = "", **more: Any) -> None:
    options = {**_SHARED[name], **more}
    command.add_argument(name, **{**options, "help": options["help"].format(text)})


def _add_backend(command: argparse.ArgumentParser, default: str) -> None:
    """Add ``--backend`` and ``--import`` to a command; ``default`` is the text about a command without them."""
    _shared(command, "--backend", default)
    _shared(command, "--import")


def _add_file(command: argparse.ArgumentParser, text: str = "a capture") -> None:
    command.add_argument("file", metavar="FILE", help=text)


def _add_run(commands: _Commands) -> None:
    run = _add(
        commands,
        "run",
        "run a script and record every frame that it compiles",
        more="The script runs as `python SCRIPT` would run it; the captures are in the folder captures.",
        usage="torch-fakeify run [options] (SCRIPT | -m MODULE) [ARGS ...]",
        examples=["run train.py --epochs 1", "run -m my_package.train", "run --minify train.py"],
        statuses="0 the script ended well, and every frame was compiled and is on record; 1 the "
        "script or a frame failed, a frame is not on record, or nothing was compiled; 2 it was not "
        "started, or ended before it compiled anything",
    )
    _add_backend(run, "instead of the script's own backends")
    run.add_argument(
        "--out",
        default="captures",
        metavar="DIR",
        help="the captures go into a new folder of it with the script's name; default: %(default)s",
    )
    run.add_argument(
        "--on-error",
        choices=["warn", "raise"],
        default="warn",
        help="if a frame cannot be recorded: warn and compile it, or raise in the script; "
        "default: %(default)s",
    )
    run.add_argument(
        "--level",
        choices=["dynamo", "aot"],
        default="dynamo",
        help="what is recorded: the frames that Dynamo gives to the backend, or the joint, forward, "
        "backward and inference graphs that AOTAutograd makes of them; default: %(default)s",
    )
    _flag(
        run,
        "--infer-fakes",
        "infer the fake kernels of operators that have none, by running these on made-up inputs in "
        "another process, and write them to fake_kernels.py beside the captures",
    )
    _flag(run, "--script-status", "end with the script's own exit status, as python SCRIPT would")
    _flag(
        run,
        "--with-data",
        "also record the elements of tensors of at most 4096 bytes that a graph itself holds, "
        "and of 0-dim inputs",
    )
    _flag(
        run,
        "--with-paths",
        "do not shorten absolute paths and messages of exceptions, which may name the user, "
        "the host and folders",
    )
    run.add_argument(
        "--format-version",
        type=int,
        default=VERSION,
        metavar="N",
        help="of the files, for an older reader; default: %(default)s",
    )
    script = run.add_argument("script", metavar="SCRIPT", help="a Python file")
    arguments = run.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script"
    )
    run.add_argument(
        "-m",
        action=_ModuleOfRun,
        nargs=argparse.REMAINDER,
        const=(script, arguments),
        dest="module",
        metavar="MODULE",
        help="run a module, as python -m does",
    )
    _flag(run, "--minify", "then minify the first frame that failed")


def _add_show(commands: _Commands) -> None:
    show = _add(
        commands,
        "show",
        "what a capture holds, or which captures a directory holds",
        more="Without an option it is a page: the failure, what there is, symbols, guards, and arguments. "
        "Names are those of the program.",
        examples=[
            "show captures",
            "show captures/train/000-forward-1a2b3c4d.fkf",
            "show --code FILE",
        ],
        statuses="0 printed",
    )
    _flag(show, "--code", "the code of the graph")
    _flag(show, "--guards", "symbols, guards and runtime asserts, each with its line")
    _flag(show, "--inputs", "every input, and which of them share a storage")
    _flag(
        show,
        "--unproved",
        "the conditions that are left to run time, and what is known where one failed; imports torch",
    )
    _flag(show, "--all", "everything but the records themselves")
    _flag(show, "--torch-names", "names of symbols and inputs as in torch's messages: s77, l_x_")
    _flag(show, "--json", "the records, as torch_fakeify.loads reads")
    _flag(show, "--privacy", "every text in the file that comes from the program that was recorded")
    show.add_argument("file", metavar="FILE|DIR", help="a capture, or a directory of them")


def _add_replay(commands: _Commands) -> None:
    replay = _add(
        commands,
        "replay",
        "compile a capture, or a corpus of them, in fresh interpreters",
        more="The result is compared with the recorded one.",
        examples=[
            "replay FILE",
            "replay --backend aot_eager FILE",
            "replay --jsonl results.jsonl captures",
        ],
        statuses="0 all hold; 1 some do not: with --against, some that held earlier or were "
        "not there; 2 bad usage, or a capture has no verdict, as a bad file",
    )
    _add_backend(replay, "default: the recorded one")
    _shared(replay, "--device")
    _shared(replay, "--timeout", "of a compilation")
    _shared(
        replay, "--memory", "that the compilation may hold; default: nine tenths of what is free"
    )
    _shared(replay, "--python", "may be repeated, for a table side by side")
    _flag(replay, "--time", "also run what was compiled, and print how long a call takes")
    replay.add_argument(
        "--tolerance",
        type=_ratio,
        metavar="R",
        help="with several --python: one that takes more than R times as long as the first, to compile or to "
        "run, sets exit status 1",
    )
    replay.add_argument(
        "files", nargs="+", metavar="FILE|DIR", help="captures, and directories of them"
    )
    corpus = replay.add_argument_group("for a directory, or several files")
    corpus.add_argument(
        "--jobs", type=_count, metavar="N", help="captures at a time; default: one a core"
    )
    corpus.add_argument(
        "--jsonl", metavar="OUT", help="write a JSON object for each capture when it is done"
    )
    corpus.add_argument("--junit", metavar="OUT", help="write JUnit XML")
    corpus.add_argument(
        "--against",
        metavar="EARLIER",
        help="compare with the --jsonl of an earlier run: only new failures set exit status 1",
    )
    _flag(corpus, "--resume", "reuse the results in the file of --jsonl")
    _flag(corpus, "--all", "compile every capture, also several of one frame")
    corpus.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="of a Dask scheduler, whose workers compile (extra: dask)",
    )


def _add_bisect(commands: _Commands) -> None:
    bisect = _add(
        commands,
        "bisect",
        "the first of several interpreters at which the verdict of a capture changes",
        examples=["bisect FILE --python old/bin/python --python new/bin/python"],
        statuses="0 found; 1 the first and the last interpreter have one verdict; 2 bad usage, a "
        "bad file, or an interpreter without torch",
    )
    _add_backend(bisect, "default: the recorded one")
    _shared(bisect, "--python", "at least two, in order")
    _shared(bisect, "--device")
    _shared(bisect, "--timeout", "of a compilation")
    _shared(bisect, "--memory", "that a compilation may hold")
    _add_file(bisect)


def _add_diff(commands: _Commands) -> None:
    diff = _add(
        commands,
        "diff",
        "why two frames are not one",
        more="For a function that was compiled again: what is different in the second frame.",
        examples=["diff captures/train/000-loss-*.fkf captures/train/001-loss-*.fkf"],
        statuses="0 one frame; 1 two frames",
    )
    diff.add_argument("a", metavar="A", help="a capture")
    diff.add_argument("b", metavar="B", help="another one")


def _add_fuzz(commands: _Commands) -> None:
    fuzz = _add(
        commands,
        "fuzz",
        "run a frame at other sizes that its guards admit",
        more="What was compiled is compared with eager at each of the sizes.",
        examples=["fuzz FILE", "fuzz --runs 200 --save sizes.json FILE"],
        statuses="0 all that was compared holds; 1 some sizes fail; 2 nothing was compared "
        "with eager, or the frame cannot be run",
    )
    _add_backend(fuzz, "default: the recorded one")
    _shared(fuzz, "--runs", default=60)
    _shared(fuzz, "--seed", "of sizes and data")
    _shared(fuzz, "--timeout", "of a batch of 20 sizes")
    _shared(fuzz, "--memory", "that a batch may hold")
    fuzz.add_argument(
        "--save", metavar="JSON", help="write the sizes that fail, for `minify --sizes`"
    )
    _add_file(fuzz)


def _add_fakes(commands: _Commands) -> None:
    fakes = _add(
        commands,
        "fakes",
        "compare the fake values of a frame with what its operators return",
        more="The operators run on made-up inputs, at sizes that the guards admit, in other processes. For the "
        "first one that differs a script is written that calls it alone, and uses torch alone.",
        examples=["fakes FILE", "fakes --import my_operators --runs 100 FILE"],
        statuses="0 all that was compared is as its fake value; 1 an operator differs, crashes or hangs; "
        "2 nothing was compared, or the frame cannot be run",
    )
    _shared(fakes, "--import")
    _shared(fakes, "--runs", default=20)
    _shared(fakes, "--sizes", "they are searched")
    _shared(fakes, "--seed", "of sizes and data")
    _shared(fakes, "--device")
    _shared(fakes, "--timeout", "of a batch of 20 sizes")
    _shared(fakes, "--memory", "that a batch may hold")
    fakes.add_argument("-o", "--output", metavar="OUT.py", help="default: FILE with .fakes.py")
    _add_file(fakes)


def _add_report(commands: _Commands) -> None:
    report = _add(
        commands,
        "report",
        "a capture, or a directory of them, as one page for a browser",
        examples=["report FILE", "report captures", "report --stages -o page.html FILE"],
        statuses="0 written",
    )
    report.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .html")
    _flag(
        report,
        "--stages",
        "also compile the frame in a process of its own: graphs of AOTAutograd, graphs and code of "
        "inductor, compile time",
    )
    _add_backend(report, "with --stages; default: the recorded one")
    _shared(report, "--timeout", "of the compilation")
    _add_file(report)


def _add_minify(commands: _Commands) -> None:
    minify = _add(
        commands,
        "minify",
        "the smallest frame that fails in the same way",
        more="It writes a capture, and a script that uses torch alone. A script FILE.py is recorded first.",
        examples=[
            "minify FILE",
            "minify train.py -- --epochs 1",
            "minify --accuracy --sizes 'x.size(0)=7' FILE",
        ],
        statuses="0 written, and it fails in the same way; 1 the frame does not fail, or not each "
        "time in the same way; 2 bad usage, a bad file, or it cannot be decided",
    )
    _add_backend(minify, "default: the recorded one")
    minify.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .min.fkf")
    _flag(
        minify,
        "--accuracy",
        "also run what was compiled, forward and backward, and compare with eager",
    )
    _shared(minify, "--sizes", "as recorded")
    _shared(minify, "--seed", "of data")
    _shared(minify, "--device")
    _shared(minify, "--timeout", "for one try")
    _shared(minify, "--memory", "that one try may hold")
    minify.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="tries at a time; default: 1"
    )
    _flag(minify, "--no-script", "write the capture alone")
    minify.add_argument("file", metavar="FILE|SCRIPT.py", help="a capture, or a script to record")
    minify.add_argument(
        "args", nargs="*", metavar="ARGS", help="of the script; behind -- if they begin with -"
    )
    minify.set_defaults(args=[])


def _add_issue(commands: _Commands) -> None:
    issue = _add(
        commands,
        "issue",
        "a capture as the text of a bug report, with a script that was run",
        examples=["issue -o bug.md FILE.min.fkf"],
        statuses="0 the script fails as the frame does; 1 it does not, or no failure is on record; "
        "2 there is no script, or it cannot be decided",
    )
    _add_backend(issue, "default: the recorded one")
    issue.add_argument("-o", "--output", metavar="OUT.md", help="default: standard output")
    _shared(issue, "--timeout", "of the script")
    _add_file(issue, "best one that `minify` wrote")


def _add_doctor(commands: _Commands) -> None:
    doctor = _add(
        commands,
        "doctor",
        "what works here, and what to install for what does not",
        more="With --all also what is known of the installed torch.",
        examples=["doctor"],
        statuses="0 all is known; 1 something is not, or torch is refused or missing",
    )
    _flag(doctor, "--all", "also the census of torch, and the drop-in's sites")
    _flag(doctor, "--json", "the same as a JSON object")


def _add_demo(commands: _Commands) -> None:
    demo = _add(
        commands,
        "demo",
        "record, replay and minify a failing frame, in a new folder of the current one",
        examples=["demo", "demo --check --backend aot_eager"],
        statuses="0 each step did what it says; 1 one did not",
    )
    _flag(
        demo,
        "--check",
        "instead: record a small decoder, rebuild it in another process and compare it with eager",
    )
    _add_backend(demo, "with --check; default: inductor")
