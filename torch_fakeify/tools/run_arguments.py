"""The arguments of the command ``run``."""

from __future__ import annotations

import argparse
from typing import Any

from torch_fakeify.serialization.container import VERSION


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    """Add the script or module with its arguments, and the options that ``run`` alone has."""
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
    run.add_argument(
        "--infer-fakes",
        action="store_true",
        help="infer the fake kernels of operators that have none, by running these on made-up inputs in "
        "another process, and write them to fake_kernels.py beside the captures",
    )
    run.add_argument(
        "--script-status",
        action="store_true",
        help="end with the script's own exit status, as python SCRIPT would",
    )
    run.add_argument(
        "--with-data",
        action="store_true",
        help="also record the elements of tensors of at most 4096 bytes that a graph itself holds, "
        "and of 0-dim inputs",
    )
    run.add_argument(
        "--with-paths",
        action="store_true",
        help="do not shorten absolute paths and messages of exceptions, which may name the user, "
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
    run.add_argument(
        "--minify", action="store_true", help="then minify the first frame that failed"
    )


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
