"""torchgradx._cuda without a GPU: found, built, linked and loaded beside whatever torch is here."""

import os
import shutil
import sys
from types import SimpleNamespace

import cubins
import pytest
from backends import CUDA_OPERATORS
from emulation.build import cuda_toolkit
from processes import run
from test_packaging import PACKAGE, ROOT, needs_extension


# Whether CUDA kernels are built, and with what
def toolkit_in(folder, release="13.0"):
    (folder / "bin").mkdir(parents=True)
    (folder / "lib64").mkdir()
    (folder / "lib64/libcudart_static.a").touch()
    nvcc = folder / "bin/nvcc"
    said = f"echo 'Cuda compilation tools, release {release}, V{release}.88'"
    nvcc.write_text(f"#!/bin/sh\necho '#$ TOP={folder}/bin/..' >&2\n{said}\n")
    nvcc.chmod(0o755)
    return folder


@pytest.fixture
def clean(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCHGRADX_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_wrapper_of_nvcc_on_the_path_is_seen_through(clean, tmp_path):
    home = toolkit_in(tmp_path / "cuda")
    wrapper = tmp_path / "bin/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    clean.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    assert cuda_toolkit.toolkit() == home


@pytest.mark.parametrize(("settings", "torchs", "found", "reason"), [
    ({"CUDA": "0"}, "13.0", True, "TORCHGRADX_CUDA=0"), ({}, "13.1", True, None),
    ({}, None, True, "the installed torch is a CPU build"), ({}, "13.0", False, "there is no nvcc"),
    ({}, "12.8", True, "the installed torch has CUDA 12.8, and "),
    ({"CUDA": "1"}, None, True, None), ({"CUDA": "1"}, "12.8", True, None),
    ({"ARCH": "7.5"}, "13.1", True, "TORCH_CUDA_ARCH_LIST has only 7.5"),
])  # fmt: skip
def test_when_cuda_kernels_are_left_out(clean, tmp_path, settings, torchs, found, reason):
    for name, value in settings.items():
        clean.setenv({"CUDA": "TORCHGRADX_CUDA", "ARCH": "TORCH_CUDA_ARCH_LIST"}[name], value)
    home = toolkit_in(tmp_path / "cuda") if found else None
    why = cuda_toolkit.why_not(home, SimpleNamespace(version=SimpleNamespace(cuda=torchs)))
    assert why is None if reason is None else why.startswith(reason)


@pytest.mark.parametrize(("asked", "present", "built"), [
    ("", [], "8.0+PTX;9.0a"), ("", [(9, 0), (9, 0)], "9.0a"),
    ("", [(9, 0), (8, 6), (7, 5)], "8.6;9.0a"), ("", [(10, 0), (9, 0)], "9.0a;10.0+PTX"),
    ("", [(7, 5)], "8.0+PTX;9.0a"), ("8.9", [(9, 0)], "8.9"), ("native", [(9, 0)], "9.0a"),
    ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", [], "8.0;8.6;9.0a;10.0;12.0+PTX"),
    ("8.6;9.0+PTX", [], "8.6;8.0+PTX;9.0a"), ("Ampere Hopper", [], "Ampere;8.0+PTX;9.0a"),
])  # fmt: skip
def test_architectures(clean, capfd, asked, present, built):
    clean.setenv("TORCH_CUDA_ARCH_LIST", asked)
    count, capability = lambda: len(present), lambda gpu: present[gpu]
    gpus = SimpleNamespace(device_count=count, get_device_capability=capability)
    assert cuda_toolkit.architectures(SimpleNamespace(cuda=gpus)) == built
    assert ("leaving out 7.5" in capfd.readouterr().err) == ("7.5" in asked)


# A library that does not load
def package_with(library, folder):
    """A copy of the package with this for torchgradx._cuda."""
    copy = folder / "torchgradx"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_cuda.*", "__pycache__"))
    if isinstance(library, bytes):
        (copy / "_cuda.so").write_bytes(library)
    else:
        shutil.copy(library, copy / library.name)
    return copy


BROKEN = """
import torch, torchgradx
from torchgradx import ops
assert ops.NATIVE and not ops.CUDA
a, b = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
expected = torch.einsum("nti,nto->noi", a, b).square().sum((1, 2))
torch.testing.assert_close(ops.linear_sq_norms(a, b), expected)
"""


@needs_extension
def test_cuda_kernels_that_do_not_load_leave_the_cpus_at_work(tmp_path):
    copy = package_with(b"not a library", tmp_path)
    python = [sys.executable, "-W", "always::RuntimeWarning"]
    done = run(*python, "-c", BROKEN, cwd=tmp_path, PYTHONPATH=str(copy.parent))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1, done.stderr
    assert "torchgradx._cuda was built but it does not load" in done.stderr
    done = run(*python, "-m", "torchgradx", cwd=tmp_path, PYTHONPATH=str(copy.parent))
    assert "CUDA kernels  none: it does not load" in done.stdout


BUILD = """
import sys
sys.path.insert(0, "build_tools")
import cuda_toolkit, torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension
module = cuda_toolkit.extension(cuda_toolkit.toolkit(), torch, ["-O1", "-fvisibility=hidden"])
into, *module.extra_objects = sys.argv[1:]
*made, last = [source for source in module.sources if source.endswith(".cu")]
module.sources = [source for source in module.sources if source not in made]
arguments = ["-q", "build_ext", "--build-lib", into, "--build-temp", into + "/objects"]
options = {"build_ext": {"force": True}}
setup(name="cuda", ext_modules=[module], options=options, cmdclass={"build_ext": BuildExtension},
      script_args=arguments)
"""


@pytest.fixture(scope="module")
def library():
    """The installed one, else one built here and kept: its last .cu as setup.py has it compiled,
    and the objects that the others have in cubins.py."""
    installed = next(PACKAGE.glob("_cuda.*.so"), None)
    if installed:
        return installed
    if cubins.why_not():
        pytest.skip("the CUDA library is NOT built: no nvcc")
    into, environment = ROOT / "build/cuda", {"MAX_JOBS": os.environ.get("MAX_JOBS", "2")}
    _, *others = cubins.objects()
    done = run(sys.executable, "-c", BUILD, str(into), *map(str, others), cwd=ROOT, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(into.glob("torchgradx/_cuda.*.so"))


def test_it_needs_no_library_that_a_machine_without_a_gpu_may_lack(library):
    said = run("readelf", "--dynamic", str(library), cwd=ROOT).stdout
    needed = [line for line in said.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [line for line in needed if "cuda" in line.lower()]


LOADED = """
import torch
from torchgradx import extension, ops
assert ops.NATIVE and ops.CUDA, extension.WHY_NOT_CUDA
registered = torch._C._dispatch_has_kernel_for_dispatch_key
print([name for name in {names} if not registered(f"torchgradx::{{name}}", "CUDA")])
assert ops.linear_sq_norms(torch.ones(2, 3, 4), torch.ones(2, 3, 5)).tolist() == [180.0, 180.0]
"""


@needs_extension
def test_it_loads_without_a_driver_and_has_every_operator(library, tmp_path):
    copy = package_with(library, tmp_path)
    code = LOADED.format(names=CUDA_OPERATORS)
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(copy.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    facts = run(sys.executable, "-m", "torchgradx", cwd=tmp_path, PYTHONPATH=str(copy.parent))
    assert "CUDA kernels  compiled for " in facts.stdout
