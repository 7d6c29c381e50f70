"""The installation, what a source distribution holds, what an import does and does not do; and the
public names as a type checker and a notebook see them."""

import importlib.metadata
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import processes
import pytest
import torch
import torch.nn.functional as F
from attach_models import mlp, square

import torchgradx
from torchgradx import cli, extension, ops

ROOT = Path(__file__).parent.parent
PACKAGE = Path(torchgradx.__file__).parent
needs_extension = pytest.mark.skipif(not ops.NATIVE, reason="installed without the extension")


def python(code, *, path=None, cwd=None):
    """Run `code` in a fresh interpreter, outside the source tree unless `cwd` says otherwise."""
    environment = {"PYTHONPATH": str(path)} if path else {}
    warned, cwd = ["-W", "always::RuntimeWarning"], cwd or Path(sys.executable).parent
    return processes.python(*warned, "-c", code, cwd=cwd, timeout=120, **environment)


def checked(run):
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_suite_sees_the_installed_package_which_is_typed():
    assert (PACKAGE / "py.typed").exists()
    compiled = any(PACKAGE.glob("_C.*.so"))
    assert PACKAGE.parent != ROOT or compiled, "run `pytest`: `python -m` imports ./torchgradx"


def test_the_version_is_written_once():
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)[1]
    assert importlib.metadata.version("torchgradx") == version
    code = [ROOT / "setup.py", *ROOT.glob("torchgradx/*.py"), *ROOT.glob("csrc/**/*.*")]
    assert [p.name for p in code if f'"{version}"' in p.read_text(errors="replace")] == []


@needs_extension
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_a_wheel_is_loaded_and_says_what_it_needs(tmp_path):
    """Of the package that is installed; without its extension it is no good."""
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".so")]
    metadata = f"Name: torchgradx\nVersion: {torchgradx.__version__}\n"
    for name, kept in (("whole", files), ("bare", [f for f in files if f.suffix == ".py"])):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr("torchgradx-0.dist-info/METADATA", f"Metadata-Version: 2.1\n{metadata}")
            for path in kept:
                wheel.write(path, path.relative_to(PACKAGE.parent))
    script = ROOT / "build_tools" / "built_wheel.py"
    whole, bare = (processes.python(script, tmp_path / f"{name}.whl") for name in ("whole", "bare"))
    assert re.search(r"^_C\..* needs GLIBC 2\.\d+, GLIBCXX 3\.4", checked(whole), re.MULTILINE)
    assert f"torch         {torch.__version__}" in whole.stdout
    assert bare.returncode != 0
    assert "does not load" in bare.stderr


IMPORT = """
import sys, time, torch
started = []
sys.addaudithook(lambda event, args: started.append(args[0]) if event in EVENTS else None)
EVENTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}
begin = time.perf_counter()
import torchgradx
print(time.perf_counter() - begin)
assert not started, started
assert "torch.utils.cpp_extension" not in sys.modules
"""


def test_import_is_quick_and_compiles_nothing():
    # beyond torch's own import; it takes 0.1 s, and the best of three bears a busy machine
    assert min(float(checked(python(IMPORT))) for _ in range(3)) < 1.0


@needs_extension
def test_the_extension_brings_no_second_openmp_runtime():
    code = """
import torch
def runtimes():
    lines = open("/proc/self/maps").read().split()
    return {path for path in lines if "omp" in path.rsplit("/", 1)[-1] and ".so" in path}
before = runtimes()
import torchgradx
assert runtimes() == before, runtimes() - before
"""
    checked(python(code))


@needs_extension
def test_the_extension_shows_no_path_of_the_building_machine():
    binary = next(PACKAGE.glob("_C.*.so")).read_bytes()
    for path in (ROOT, Path(sys.prefix)):
        assert f"{path}/".encode() not in binary


@needs_extension
def test_the_extension_uses_no_stream():
    """With a second, statically linked copy of libstdc++, streams crash or stop at a number."""
    mangled = rb"_ZNK?So|lsE?RSo|ios_base|St6locale|basic_([a-z]*stream|[a-z]*buf|ios)I"
    for library in PACKAGE.glob("_*.so"):
        names = set(re.findall(rb"\w+", library.read_bytes()))
        assert sorted(name for name in names if re.search(mangled, name)) == [], library.name


@needs_extension
def test_error_texts_of_the_extension_keep_their_numbers_and_sizes():
    a, b = torch.ones(2, 3, 4), torch.ones(2, 3, 5)
    for other, text in (
        (b, "rank1 needs activations [N, T, I] with T of 1 at most; got [2, 3, 4]"),
        (b.long(), "grad_output must be float32, float64, bfloat16 or float16; got Long"),
        (b[0], "grad_output must be [N, T, O]; got 2 dimensions, [3, 5]"),
    ):
        with pytest.raises(RuntimeError) as caught:
            torch.ops.torchgradx.rank1_sq_norms(a, other, False)
        assert str(caught.value).splitlines()[0] == text


def test_the_facts_are_printed_by_info_and_without_an_argument(capsys):
    assert cli.main(["info"]) == 0
    code = "import runpy; runpy.run_module('torchgradx', run_name='__main__')"
    for facts in (capsys.readouterr().out, checked(python(code))):
        names = re.findall(r"^(\w+(?: \w+)?)  +\S", facts, re.MULTILINE)
        wanted = "torchgradx, torch, extension, CPU, CUDA kernels, device, backend auto"
        assert names == wanted.split(", ")
    assert ("loaded" if ops.NATIVE else "not loaded") in facts
    kernels = "compiled for " if ops.CUDA else f"none: {extension.WHY_NOT_CUDA}"
    assert f"CUDA kernels  {kernels}" in facts
    assert importlib.metadata.version("torchgradx") in facts


FALLBACK = """
import torch, torchgradx
import torchgradx.ops
assert not torchgradx.ops.NATIVE
a, b = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
expected = torch.einsum("nti,nto->noi", a, b).square().sum((1, 2))
torch.testing.assert_close(torchgradx.ops.linear_sq_norms(a, b), expected)
model = torch.nn.Linear(5, 2)
with torchgradx.attach(model) as probe:
    model(a[0]).square().mean().backward()
    assert probe.norms().shape == (4,)
"""


@pytest.fixture
def uncompiled(tmp_path):
    copy = tmp_path / "torchgradx"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_C.*", "_cuda.*", "__pycache__"))
    return copy


def test_without_the_extension_it_warns_once_and_works(uncompiled):
    run = python(FALLBACK, path=uncompiled.parent)
    checked(run)
    assert run.stderr.count("RuntimeWarning") == 1, run.stderr
    assert "without its compiled extension" in run.stderr


SDIST = """
import sys
sys.modules["torch"] = None  # an import of it raises
sys.argv = ["setup.py", "-q", "sdist", "--dist-dir", sys.argv[1]]
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": "setup.py"})
"""


def test_the_sdist_needs_no_torch(tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    made = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT, tree, ignore=made)
    checked(python(SDIST.replace("sys.argv[1]", repr(str(tmp_path))), cwd=tree))
    with tarfile.open(next(tmp_path.glob("torchgradx-*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}  # all of them: see .ci/run
    assert {"setup.py", "csrc/python.cpp", "tests/test_packaging.py"} <= held


# ---- Types, and what is shown --------------------------------------------------------------------
TYPES = """
import numpy as np
import torch
from numpy.typing import NDArray
from typing import Any, assert_type
import torchgradx

model = torch.nn.Linear(3, 2)
probe = torchgradx.attach(model, clip=True)
assert_type(probe.norms(), torch.Tensor)
assert_type(probe.norms(loss_scale=2.0), torch.Tensor)
assert_type(probe.norms(per="module"), dict[str, torch.Tensor])
assert_type(probe.norms("parameter"), dict[str, torch.Tensor])
assert_type(probe.clip_grad_norm_(1.0), torch.Tensor)
assert_type(probe.clip_grad_norm_(1.0, "parameter"), dict[str, torch.Tensor])
assert_type(probe.clip_grad_norm_(factors=lambda n: 1 / n, per="module"), dict[str, torch.Tensor])
loss = torch.nn.functional.cross_entropy
x = y = torch.ones(2)
assert_type(torchgradx.grad_norms(model, loss, x, y), torch.Tensor)
assert_type(torchgradx.grad_norms(model, loss, x, y, per="module"), dict[str, torch.Tensor])
assert_type(torchgradx.score(model, loss, [], kind="egl"), NDArray[Any])
assert_type(torchgradx.score(model, loss, [], per="parameter"), dict[str, NDArray[Any]])
assert_type(torchgradx.score(model, loss, [], kind=["norm", "loss"]), dict[str, NDArray[Any]])
ids = lambda args, kwargs: args[1]
assert_type(torchgradx.score(model, loss, [], sample_ids=ids), dict[str, NDArray[Any]])
probe.loss_scale = torchgradx.token_weights(y)
torchgradx.NoiseScale().update(probe)
"""
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# torch's own backward is untyped, and pages that annotated their functions would not read better.
MYPY = ["-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
MYPY += ["--disable-error-code=no-untyped-call", "--disable-error-code=no-untyped-def"]


def test_results_have_the_types_that_their_arguments_ask_for_and_the_readme_is_typed(tmp_path):
    pytest.importorskip("mypy")
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    ours = [block for block in blocks if "bridges" not in block]  # two callbacks of one name
    assert ours
    (tmp_path / "results.py").write_text(TYPES)
    (tmp_path / "readme.py").write_text("\n".join(ours))
    done = processes.python(*MYPY, "results.py", "readme.py", cwd=tmp_path, MYPYPATH=str(ROOT))
    assert done.returncode == 0, done.stdout


def test_a_probe_shows_what_it_holds_and_public_names_alone():
    model = mlp()
    probe = torchgradx.attach(model)
    square(model, torch.randn(4, 3)).backward()
    assert repr(probe) == "Probe(Sequential, 4 parameters, 4 samples recorded)"
    text = probe.explain()
    assert isinstance(text, str)
    assert text._repr_html_().startswith("<pre>2 layers: 2 ")
    assert not [name for name in dir(probe) if name.startswith("_")]
    assert {"norms", "clip_grad_norm_", "loss_scale", "explain"} <= set(dir(probe))
    assert set(dir(torchgradx)) == {*torchgradx.__all__, "__version__"}
    probe.remove()
    assert repr(probe) == "Probe(Sequential, removed)"


def test_a_report_shows_a_table():
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    report = torchgradx.verify(mlp(), F.cross_entropy, x, y)
    assert repr(report).startswith("Report(agrees: 4 parameters, largest error ")
    wrong = torchgradx.Report({"<w>": torch.ones(2)}, {"<w>": torch.full((2,), 2.0)}, 1e-3)
    assert repr(wrong).startswith("Report(differs")
    assert "&lt;w&gt;" in wrong._repr_html_()
    assert "5.00e-01  &lt;- differs" in wrong._repr_html_()
