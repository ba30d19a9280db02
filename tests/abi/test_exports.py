"""What the built host engine shows to a linker, and what it needs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.abi.headers import our_declarations, our_text
from tests.rank_process import HOST_LIBRARY, ROOT, load_binding

nccl = load_binding()


def lines_of(*command) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return {line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", str(HOST_LIBRARY))}


@pytest.fixture(scope="module")
def dynamic() -> str:
    return "\n".join(lines_of("readelf", "-d", "-W", str(HOST_LIBRARY)))


def test_what_the_binding_and_other_clients_call_is_exported(exported):
    assert set(our_declarations(our_text()).functions) <= exported
    assert set(nccl.FUNCTIONS) | set(nccl.HOST_FUNCTIONS) <= exported


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
def test_what_cupy_needs_is_exported(exported):
    (folder,) = importlib.util.find_spec("cupy_backends").submodule_search_locations
    (module,) = Path(folder, "cuda", "libs").glob("nccl.*.so")
    needed = {line.split()[-1] for line in lines_of("nm", "-D", "--undefined-only", str(module))}
    assert {name for name in needed if name.startswith("nccl")} <= exported


def test_nothing_is_exported_that_no_header_declares(exported):
    headers = "".join(path.read_text() for path in (ROOT / "kernels/include/coll").glob("*_abi.h"))
    assert {name for name in exported if not re.search(rf"\b{name}\(", headers)} == set()


def test_it_needs_the_c_and_cxx_libraries_only(dynamic):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    allowed = r"(lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux.*)"
    assert not {name for name in needed if not re.fullmatch(allowed, name)}
    undefined = {line.split()[-1] for line in lines_of("nm", "-D", "--undefined-only", str(HOST_LIBRARY))}
    versions = r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+$"
    loose = {name for name in undefined if not re.search(versions, name)}
    # Weak ones that the compiler puts into every shared object, and that may stay unresolved.
    assert loose <= {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}
    assert not {name for name in undefined if name.startswith(("nccl", "collHost", "cuda", "cu"))}


def test_it_does_not_pass_for_nccl(dynamic):
    soname = re.search(r"\(SONAME\).*\[(.*)\]", dynamic)[1]
    assert soname == "libcollectives_host.so"
    assert "SYMBOLIC" in dynamic, "its own calls could go to another NCCL in the process"


def test_it_leaves_the_heap_and_the_stack_alone():
    """No executable stack, and no text relocations."""
    headers = "\n".join(lines_of("readelf", "-l", "-W", str(HOST_LIBRARY)))
    stack = re.search(r"GNU_STACK.*", headers)[0]
    assert "RWE" not in stack
    assert "TEXTREL" not in "\n".join(lines_of("readelf", "-d", "-W", str(HOST_LIBRARY)))


def test_variants_of_one_source_share_no_symbols():
    """An object built for AVX-512 must not supply a weak function that all others then use on a CPU without it."""
    objects = [path for name in ("baseline", "avx2", "avx512") for path in (ROOT / "build/host").glob(f"*.{name}.o")]
    if not objects:
        pytest.skip("no objects in build/host: the library was not built in place")
    for path in objects:
        weak = [line for line in lines_of("nm", "-C", str(path)) if re.search(r" [VvWwu] ", line)]
        assert not weak, f"{path.name}: {weak}"
