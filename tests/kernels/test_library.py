"""Builds: once for all processes, whole or not at all, and refused with a reason; what is said about the result."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_ptdp.kernels import build, is_compiled, library, references, status

BUILDER = Path(build.__file__)
HERE = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("builder", {str(BUILDER)!r})
builder = importlib.util.module_from_spec(spec); sys.modules["builder"] = builder; spec.loader.exec_module(builder)
"""


def fake_compiler(folder: Path, body: str) -> Path:
    """A program that does `body` and writes what is asked of it."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exit 0; fi\nfor out; do :; done\n{body}\n')
    path.chmod(0o755)
    return path


def start(folder: Path, compiler: Path) -> subprocess.Popen[str]:
    """A process that builds a library of one object into a cache below `folder`."""
    sources = folder / "sources"
    sources.mkdir(exist_ok=True)
    (sources / "a.cpp").touch()
    code = HERE + textwrap.dedent(f"""
        commands = builder.Commands(builder.Path({str(sources)!r}), {{"a.o": ({str(compiler)!r}, "a.cpp")}},
                            ({str(compiler)!r}, "a.o"))
        try:
            print(json.dumps(str(builder.cached(commands, again=len(sys.argv) > 1))))
        except builder.BuildError as error:
            print(json.dumps({{"error": str(error)}}))
    """)
    environment = {**os.environ, "PTDP_CACHE": str(folder / "cache")}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]):
    return json.loads(process.communicate(timeout=30)[0])


def test_of_several_processes_one_builds(tmp_path):
    compiler = fake_compiler(tmp_path, f'echo run >> {tmp_path}/runs; sleep 0.3; echo whole > "$out"')
    answers = [answer(process) for process in [start(tmp_path, compiler) for _ in range(3)]]
    assert len(set(answers)) == 1
    assert Path(answers[0]).read_text() == "whole\n"
    assert (tmp_path / "runs").read_text().count("run") == 2  # an object and the library


def test_killed_build_leaves_nothing_that_counts(tmp_path):
    compiler = fake_compiler(tmp_path, f'echo half > "$out"; touch {tmp_path}/begun; sleep 30')
    process = start(tmp_path, compiler)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    fake_compiler(tmp_path, 'echo whole > "$out"')
    assert Path(answer(start(tmp_path, compiler))).read_text() == "whole\n"
    assert not list((tmp_path / "cache").glob("*/building"))


def test_failed_build_shows_the_compiler_s_last_words_and_is_not_tried_each_time(tmp_path):
    compiler = fake_compiler(tmp_path, f"echo run >> {tmp_path}/runs; echo 'error: no such header' >&2; exit 1")
    assert "error: no such header" in answer(start(tmp_path, compiler))["error"]
    again = answer(start(tmp_path, compiler))["error"]
    assert "the build failed before (ptdp kernels --build-again true tries again)" in again
    assert "error: no such header" in again
    assert (tmp_path / "runs").read_text().count("run") == 1


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler: no-such-compiler is not on the path"),
        ({"PTDP_BUILD": "off"}, "PTDP_BUILD=off"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_reason(variables, reason):
    with patch.dict(os.environ, variables), pytest.raises(build.BuildError, match=reason.replace("+", r"\+")):
        build.commands_here()


def test_digest_follows_sources_and_flags(tmp_path):
    (tmp_path / "a.cpp").write_text("1")
    kinds = [build.Commands(tmp_path, {"a.o": ("true", flag)}, ("true",)) for flag in ("-O2", "-O3", "-O2")]
    first, second, third = (commands.digest for commands in kinds)
    assert first == third != second
    (tmp_path / "a.cpp").write_text("2")
    assert kinds[0].digest != first


def test_without_a_library_references_run_and_the_line_says_why():
    missing = library.Library(None, "no C++ compiler: g++ is not on the path\nand more")
    with patch.object(library, "load", lambda: missing), patch.object(status, "load", lambda: missing):
        assert not is_compiled("cpu", torch.float32)
        line = status.in_a_line()
        table = status.rows()
    expected = "kernels: none compiled, PyTorch's own operations serve (no C++ compiler: g++ is not on the path); "
    assert line.startswith(expected)
    assert ("cpu", "float32", "reference: no C++ compiler: g++ is not on the path") in table


def test_references_can_be_asked_for():
    before = is_compiled("cpu", torch.float32)
    with references():
        assert not is_compiled("cpu", torch.float32)
    assert is_compiled("cpu", torch.float32) == before
    assert not is_compiled("cpu", torch.float64)
    assert not is_compiled("meta", torch.float32)


def package(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("raise SystemExit('imported')")


MARKS = [
    f"apex/{file}"
    for file in (
        "multi_tensor_apply/multi_tensor_apply.py",
        "optimizers/fused_adam.py",
        "normalization/fused_layer_norm.py",
    )
]


@pytest.mark.parametrize(
    ("files", "kind", "clause"),
    [
        ([], "absent", "no NVIDIA Apex, Transformer Engine or flash-attn found"),
        (["apex/__init__.py"], "other", "the package apex is not NVIDIA's and is left alone"),
        (["apex/__init__.py", *MARKS], "nvidia", "found NVIDIA Apex"),
        (["apex/__init__.py", *MARKS[:2]], "other", "left alone"),
        (
            ["transformer_engine/__init__.py", "flash_attn/__init__.py"],
            "absent",
            "found Transformer Engine, flash-attn",
        ),
    ],
)
def test_packages_of_others_are_known_by_their_files_and_not_imported(files, kind, clause, tmp_path, monkeypatch):
    package(tmp_path, *files)
    monkeypatch.syspath_prepend(tmp_path)
    found = status.look_around()
    assert found.apex == kind
    assert clause in status.describe(found)
