"""How a capture begins: ``with reprokit.capture():``, or the user's script or module, run as Python itself would.

A new module object takes the name ``__main__`` and keeps it: classes of the script can be pickled until the very end,
and spawned workers find the script again. Whatever the script raises leaves here unchanged; `hide_own_frames` sees to
it that the traceback shows the script's frames only. This module imports no torch.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from reprokit.capture.failure_text import captured_lines
from reprokit.capture.options import Options, current_folder
from reprokit.errors import STAND_IN, UsageError, drop_own_frames, is_own, tb_entries
from reprokit.words import print_line

if TYPE_CHECKING:
    from reprokit.capture.session import Session

_DISPATCH = os.path.join("torch", "overrides.py")
_launcher = ModuleType("__main__")  # what was `__main__` before; kept alive, as its frames still run


@contextlib.contextmanager
def capture(output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> Iterator[Session]:
    """Watch the training loop in this block and save its first failing step.

    Writes ``output``, or ``<name>-step<N>.repro.pt`` in the current folder. With ``after="stop"`` the block is left at
    the failure and the program goes on behind it; with ``"continue"`` the loop goes on unwatched. The other options are
    ``name``, ``overwrite``, ``quiet``, ``history``, ``watch``, ``on``, ``source``, ``budget``, ``from_step``,
    ``at_step``, ``on_snapshot``, ``record``, ``on_numbers`` and ``on_event``: those of `Session`. Yields the session,
    whose ``snapshots`` are files. Raises `UsageError` when ``output`` exists and ``overwrite`` is false.
    """
    from reprokit.capture.mode import CaptureStop
    from reprokit.capture.session import Session
    from reprokit.snapshot.redact import redact_argv

    path = current_folder() / output if output is not None and not os.path.isabs(output) else output
    path = Path(path) if path is not None else None
    if path is not None and path.exists() and not options.get("overwrite"):
        raise UsageError(f"`{path}` exists already", hint="choose another name, or pass overwrite=True")
    session = Session(path, command=redact_argv(sys.argv), **options)
    try:
        with session:
            yield session
    except CaptureStop as stop:
        if stop.session is not session:
            raise
    except BaseException as error:
        peel(error)
        raise
    finally:
        session.take_away()  # also if an exception has arrived just before it could
        if not options.get("quiet"):
            if session.closing is not None:
                print_line(session.closing)
            for written, result in zip(session.snapshots, session.results, strict=True):
                for line in captured_lines(written, result, None):
                    print_line(line)


# Python attributes a warning to line 1 of `sys` when its ``stacklevel`` leads out of the script. A model that the
# script calls from outside of functions is four frames inside of it: these do for a ``stacklevel`` of eight.
exec(f"def _beyond({STAND_IN}, code, names, inner): inner({STAND_IN}, code, names)")
exec(f"def _inside({STAND_IN}, code, names): {STAND_IN}(code, names)")
_execute: Any = None
for _code in (globals()["_inside"].__code__, *[globals()["_beyond"].__code__] * 3):
    _code = _code.replace(co_filename="sys", co_firstlineno=1)
    _execute = FunctionType(_code, vars(sys), argdefs=(_execute,) if _execute else None)


def run_script(path: str, argv: Sequence[str]) -> None:
    """Run ``python path *argv``; returns when the script ends and raises what it raises, `SystemExit` included."""
    source = read_script(path)
    filename = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    sys.argv[:] = [path, *argv]
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    module = _new_main(filename, SourceFileLoader("__main__", filename), spec=None, package=None)
    _execute(exec, compile(source, filename, "exec", dont_inherit=True), module.__dict__)


def run_module(name: str, argv: Sequence[str]) -> None:
    """Run ``python -m name *argv``; returns when the module ends and raises what it raises, `SystemExit` included."""
    sys.argv[:] = ["-m", *argv]
    _set_first_path(os.getcwd())
    spec, code = _find_module(name)
    filename = spec.origin or name
    sys.argv[0] = filename
    module = _new_main(filename, spec.loader, spec=spec, package=spec.parent)
    _execute(exec, code, module.__dict__)


def read_script(path: str) -> bytes:
    """The source of a script; raises `UsageError` when there is none to read."""
    if os.path.isdir(path):
        raise UsageError(f"`{path}` is a folder", hint="name the script, or use `-m` for a package")
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"`{path}` does not exist", hint="check the path of the training script") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}", hint="check its name and its permissions") from None
    if source.startswith(b"PK\x03\x04"):
        raise UsageError(f"`{path}` is an archive, not a script", hint=f"if it is a snapshot: reprokit show {path}")
    return source


@contextlib.contextmanager
def hide_own_frames() -> Iterator[None]:
    """Let an exception pass, and have it shown later as if reprokit were not there.

    The interpreter itself reports it in the end, so that exit codes and signals come out as usual; only the hook that
    it reports through (the script's own one, if it set one) is given a shorter traceback.
    """
    try:
        yield
    except BaseException as error:
        shown_by, ending = sys.excepthook, error

        def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
            if value is ending:
                peel(value)
                traceback = value.__traceback__
            try:
                shown_by(kind, value, traceback)
            except BaseException as error:  # which the interpreter prints, too
                drop_own_frames(error)
                raise

        sys.excepthook = show
        raise


def show_exception(error: BaseException) -> None:
    """Report an exception the way the interpreter would, without frames of reprokit."""
    peel(error)
    sys.excepthook(type(error), error, error.__traceback__)


def peel(error: BaseException, seen: frozenset[int] = frozenset()) -> None:
    """Take reprokit's frames out of the tracebacks of an exception and of those it came from."""
    error.__traceback__ = _without_own_frames(error.__traceback__)
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (error.__cause__, error.__context__, *inner):
        if one is not None and id(one) not in seen:
            peel(one, seen | {id(error)})


def when_imported(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call ``then`` right after the first import of a module, at once if it is imported already.

    The function that it returns stops waiting. So that a script may set ``OMP_NUM_THREADS`` and the like before *it*
    imports torch, as it could without reprokit.
    """
    if name in sys.modules:
        then()
        return lambda: None
    awaited = _Awaited(name, then)
    sys.meta_path.insert(0, awaited)
    return awaited.remove


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds one module by asking the other finders, and adds a last act to its import.

    Stays until the module has been executed: many programs ask for a module's spec first to see if it is installed, and
    an import may fail and be tried again.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls ``then`` at its end."""
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None) if fullname == self._name else None
        loader: Any = spec.loader if spec is not None else None
        load = loader.exec_module if loader is not None else None

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # gone already if two probes got the same loader
            load(module)  # type: ignore[misc]
            if self in sys.meta_path:
                self.remove()
                self._then()

        if loader is not None:
            loader.exec_module = exec_module
        return spec


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and code that ``python -m name`` runs: the module, or a package's ``__main__``."""
    if os.path.isfile(name):
        raise UsageError(f"no module named `{name}`", hint=f"leave out `-m` to run the file: reprokit capture {name}")
    spec = None
    with contextlib.suppress(ValueError):  # of a name without a spec
        try:
            spec = importlib.util.find_spec(name) if not name.startswith(".") else None
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        hint = "`-m` looks in the current folder and among installed packages"
        raise UsageError(f"no module named `{name}`", hint=hint)
    return spec, code


def _new_main(filename: str, loader: object, *, spec: ModuleSpec | None, package: str | None) -> ModuleType:
    global _launcher
    module: Any = ModuleType("__main__")
    module.__annotations__, module.__builtins__ = {}, builtins
    module.__cached__ = spec.cached if spec is not None else None
    module.__file__, module.__loader__, module.__package__, module.__spec__ = filename, loader, package, spec
    _launcher, sys.modules["__main__"] = sys.modules["__main__"], module
    return module  # type: ignore[no-any-return]


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    entries = list(tb_entries(traceback))
    codes = [entry.tb_frame.f_code for entry in entries]
    launched = next((code for code in (run_script.__code__, run_module.__code__) if code in codes), None)
    for entry in entries[codes.index(launched) + 1 if launched is not None else 0 :]:
        if is_own(entry.tb_frame):
            continue
        if kept and _is_dispatch(kept[-1]):
            del kept[_place_of_question(kept, entry) :]
        kept.append(entry)
    linked: TracebackType | None = None
    for entry in reversed(kept):
        line = entry.tb_lineno if entry.tb_lineno is not None else -1  # an instruction without a line
        linked = TracebackType(linked, entry.tb_frame, entry.tb_lasti, line)
    return linked


def _is_dispatch(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.endswith(_DISPATCH)


def _place_of_question(kept: list[TracebackType], entry: TracebackType) -> int:
    """Where a function of torch that is written in Python has asked the tape, before the tape called it again: there
    its frames of the first time begin. The number of entries if ``entry`` is not of such a call."""
    home = os.path.dirname(kept[-1].tb_frame.f_code.co_filename) + os.sep
    for place in range(len(kept) - 1, -1, -1):
        code = kept[place].tb_frame.f_code
        if code is entry.tb_frame.f_code:
            return place
        if not code.co_filename.startswith(home):
            break
    return len(kept)
