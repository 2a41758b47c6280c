"""The parser of the command line: each command has a sentence, an example and its exit statuses."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Protocol

from torch_fakeify._version import __version__

from . import interpreter_options
from .command_options import add_backend, add_imports, count, mebibytes, seconds, sizes
from .run_arguments import add_run_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Command = Callable[[argparse.Namespace], int]

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


class _Commands(Protocol):
    choices: dict[str, argparse.ArgumentParser]

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser: ...


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


def make_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Make the parser of all commands.

    Args:
        commands: what each command calls with its arguments.
    """
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
    found: _Commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
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
    """Add a command.

    Args:
        commands: of the parser.
        name: of the command.
        sentence: what it does, for the list of commands.
        more: about it, for its own help.
        examples: command lines, without the name of the program.
        statuses: the meaning of exit statuses 0 and 1, and of 2 where it is special.
        options: of the parser.
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


def _add_file(command: argparse.ArgumentParser, text: str = "a capture") -> None:
    command.add_argument("file", metavar="FILE", help=text)


def _add_timeout(command: argparse.ArgumentParser, text: str = "of the compilation") -> None:
    command.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help=f"seconds {text}; default: 600",
    )


def _add_memory(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--memory", type=mebibytes, metavar="MIB", help=text)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="put what was on an accelerator there, e.g. cpu")


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
    add_backend(run, "instead of the script's own backends")
    add_run_arguments(run)


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
    show.add_argument("--code", action="store_true", help="the code of the graph")
    show.add_argument(
        "--guards",
        action="store_true",
        help="symbols, guards and runtime asserts, each with its line",
    )
    show.add_argument(
        "--inputs", action="store_true", help="every input, and which of them share a storage"
    )
    show.add_argument(
        "--unproved",
        action="store_true",
        help="the conditions that are left to run time, and what is known where one failed; imports torch",
    )
    show.add_argument("--all", action="store_true", help="everything but the records themselves")
    show.add_argument(
        "--torch-names",
        action="store_true",
        help="names of symbols and inputs as in torch's messages: s77, l_x_",
    )
    show.add_argument(
        "--json", action="store_true", help="the records, as torch_fakeify.loads reads"
    )
    show.add_argument(
        "--privacy",
        action="store_true",
        help="every text in the file that comes from the program that was recorded",
    )
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
    add_backend(replay, "default: the recorded one")
    _add_device(replay)
    _add_timeout(replay, "of a compilation")
    _add_memory(replay, "that the compilation may hold; default: nine tenths of what is free")
    interpreter_options.add_python(replay, "may be repeated, for a table side by side")
    interpreter_options.add_times(replay)
    replay.add_argument(
        "files", nargs="+", metavar="FILE|DIR", help="captures, and directories of them"
    )
    corpus = replay.add_argument_group("for a directory, or several files")
    corpus.add_argument(
        "--jobs", type=count, metavar="N", help="captures at a time; default: one a core"
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
    corpus.add_argument(
        "--resume", action="store_true", help="reuse the results in the file of --jsonl"
    )
    corpus.add_argument(
        "--all", action="store_true", help="compile every capture, also several of one frame"
    )
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
    add_backend(bisect, "default: the recorded one")
    interpreter_options.add_python(bisect, "at least two, in order")
    _add_device(bisect)
    _add_timeout(bisect, "of a compilation")
    _add_memory(bisect, "that a compilation may hold")
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
    add_backend(fuzz, "default: the recorded one")
    fuzz.add_argument("--runs", type=count, default=60, metavar="N", help="sizes; default: 60")
    fuzz.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of sizes and data; default: 0"
    )
    _add_timeout(fuzz, "of a batch of 20 sizes")
    _add_memory(fuzz, "that a batch may hold")
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
    add_imports(fakes)
    fakes.add_argument("--runs", type=count, default=20, metavar="N", help="sizes; default: 20")
    fakes.add_argument(
        "--sizes",
        type=sizes,
        default={},
        metavar="NAME=N,...",
        help="to run it at, or the file that `fuzz --save` wrote; default: they are searched",
    )
    fakes.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of sizes and data; default: 0"
    )
    _add_device(fakes)
    _add_timeout(fakes, "of a batch of 20 sizes")
    _add_memory(fakes, "that a batch may hold")
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
    report.add_argument(
        "--stages",
        action="store_true",
        help="also compile the frame in a process of its own: graphs of AOTAutograd, graphs and code of "
        "inductor, compile time",
    )
    add_backend(report, "with --stages; default: the recorded one")
    _add_timeout(report)
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
    add_backend(minify, "default: the recorded one")
    minify.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .min.fkf")
    minify.add_argument(
        "--accuracy",
        action="store_true",
        help="also run what was compiled, forward and backward, and compare with eager",
    )
    minify.add_argument(
        "--sizes",
        type=sizes,
        default={},
        metavar="NAME=N,...",
        help="to run it at, or the file that `fuzz --save` wrote; default: as recorded",
    )
    minify.add_argument("--seed", type=int, default=0, metavar="S", help="of data; default: 0")
    _add_device(minify)
    _add_timeout(minify, "for one try")
    _add_memory(minify, "that one try may hold")
    minify.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="tries at a time; default: 1"
    )
    minify.add_argument("--no-script", action="store_true", help="write the capture alone")
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
    add_backend(issue, "default: the recorded one")
    issue.add_argument("-o", "--output", metavar="OUT.md", help="default: standard output")
    _add_timeout(issue, "of the script")
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
    doctor.add_argument(
        "--all", action="store_true", help="also the census of torch, and the drop-in's sites"
    )
    doctor.add_argument("--json", action="store_true", help="the same as a JSON object")


def _add_demo(commands: _Commands) -> None:
    demo = _add(
        commands,
        "demo",
        "record, replay and minify a failing frame, in a new folder of the current one",
        examples=["demo", "demo --check --backend aot_eager"],
        statuses="0 each step did what it says; 1 one did not",
    )
    demo.add_argument(
        "--check",
        action="store_true",
        help="instead: record a small decoder, rebuild it in another process and compare it with eager",
    )
    add_backend(demo, "with --check; default: inductor")
