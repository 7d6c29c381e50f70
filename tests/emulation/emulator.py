"""The emulator's controls from Python: thread orders, registered memory, and what it has to say."""

import contextlib
import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from emulation import build

ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}


class EmulationError(RuntimeError):
    """What a GPU would not have said."""


class Emulator:
    """The C functions of scheduler.cpp, checker.cpp and cuda_runtime.cpp in one library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.c = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.c.cuda_emulation_message.restype = ctypes.c_char_p
        self.c.cuda_emulation_register.argtypes = [pointer, size, ctypes.c_int]
        self.c.cuda_emulation_forget.argtypes = [pointer]
        self.c.cuda_emulation_code.restype = self.c.cuda_emulation_launches.restype = size
        self.c.cuda_emulation_launches.argtypes = [pointer]

    @contextlib.contextmanager
    def buffers(self, *spans: tuple[int, int, bool]) -> Iterator[None]:
        """Global memory that kernels may touch: (address, bytes, writable)."""
        for span in spans:
            self.c.cuda_emulation_register(*span)
        try:
            yield
        finally:
            for address, *_ in spans:
                self.c.cuda_emulation_forget(address)

    @contextlib.contextmanager
    def _within(self, function: Callable[..., None], on: Any, off: Any) -> Iterator[None]:
        function(*on)
        try:
            yield
        finally:
            function(*off)

    def _flag(self, name: str) -> contextlib.AbstractContextManager[None]:
        flag = ctypes.c_bool.in_dll(self.c, f"cuda_emulation_{name}")
        return self._within(lambda value: setattr(flag, "value", value), [True], [False])

    def order(self, name: str, seed: int = 7) -> contextlib.AbstractContextManager[None]:
        forward = ORDERS["forward"], 0
        return self._within(self.c.cuda_emulation_order, (ORDERS[name], seed), forward)

    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        """Without the check of every access: several times faster, for large problems."""
        return self._within(self.c.cuda_emulation_check, [0], [1])

    def dry(self) -> contextlib.AbstractContextManager[None]:
        """Launches do nothing: for what a call allocates, at any size."""
        return self._within(self.c.cuda_emulation_dry, [1], [0])

    def multiprocessors(self, count: int) -> contextlib.AbstractContextManager[None]:
        """A device of so many; few by default, so that small problems are split too."""
        return self._within(self.c.cuda_emulation_multiprocessors, [count], [5])

    def hopper(self) -> contextlib.AbstractContextManager[None]:
        """A Hopper processor: with its shared memory, and kernels that are for it alone."""
        return self._flag("sm90")

    def launches(self, name: str = "") -> int:
        """So far, of kernels whose names contain that."""
        symbols, base = self.symbols(), self._base()
        count: int = sum(
            self.c.cuda_emulation_launches(base + kernel)
            for kernel in self.launched()
            if name in symbols[kernel]
        )
        return count

    def message(self) -> str:
        """What the emulator has to say of the last launch, with the place in the kernel."""
        text: str = self.c.cuda_emulation_message().decode()
        return f"{text}\n{self._source_line()}" if text else ""

    def _source_line(self) -> str:
        code = self.c.cuda_emulation_code()
        if not code:
            return ""
        command = ["addr2line", "-Cfips", "-e", str(self.path), hex(code)]
        with contextlib.suppress(OSError):
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            return re.sub(rf"{re.escape(str(build.ROOT))}/", "", said).strip()
        return ""

    def expect_silence(self) -> None:
        if message := self.message():
            self.c.cuda_emulation_clear()
            raise EmulationError(message)

    def launched(self) -> dict[int, tuple[int, int]]:
        """Kernels by their offset in the library: most threads of a block, most shared bytes."""
        kernel, threads, shared = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_size_t()
        out = [ctypes.byref(x) for x in (kernel, threads, shared)]
        base, rows = self._base(), {}
        for which in range(self.c.cuda_emulation_launched(0, *out)):
            self.c.cuda_emulation_launched(which, *out)
            rows[(kernel.value or 0) - base] = (threads.value, shared.value)
        return rows

    @cache  # noqa: B019  # one for each library
    def symbols(self) -> dict[int, str]:
        """Names of the library's functions, mangled, by their offset."""
        command = ["nm", str(self.path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = (line.split() for line in said.splitlines())
        return {int(row[0], 16): row[2] for row in lines if len(row) == 3}

    def _base(self) -> int:
        with Path("/proc/self/maps").open() as maps:
            line = next(line for line in maps if line.rstrip().endswith(str(self.path)))
        return int(line.split("-")[0], 16)


class Unit(Emulator):
    """Small kernels in a file of this folder, by name, for tests of the emulator itself."""

    def __init__(self, source: str, *arguments: type) -> None:
        super().__init__(build.kernels_alone(build.HERE / source))
        self.c.unit_name.restype = ctypes.c_char_p
        self.c.unit_launch.argtypes = [ctypes.c_int, *arguments]
        self.cases: dict[str, int] = {}
        while name := self.c.unit_name(len(self.cases)):
            self.cases[name.decode()] = len(self.cases)

    def launch(self, name: str, spans: list[tuple[int, int, bool]], *arguments: int) -> None:
        """Raise EmulationError if the emulator objects."""
        self.c.cuda_emulation_clear()
        with self.buffers(*spans):
            error = self.c.unit_launch(self.cases[name], *arguments)
        self.expect_silence()
        assert error == 0
