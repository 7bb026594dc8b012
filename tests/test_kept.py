"""What is kept between runs is what would be made now."""

import kept
import pytest

TEXT = 'extern "C" __global__ void copy(float* x) { x[threadIdx.x] = x[threadIdx.x + 32]; }'


def test_a_file_is_made_once_for_what_decides_its_content(tmp_path):
    made = []

    def make(path):
        made.append(path)
        path.write_text("text")

    folder = tmp_path / "kept"
    first = kept.kept(folder, ["a", "b"], ".x", make)
    assert first.read_text() == "text" and kept.kept(folder, ["a", "b"], ".x", make) == first and len(made) == 1
    others = [kept.kept(folder, *other, make) for other in ((["a"], ".x"), (["a", "c"], ".x"), (["a", "b"], ".y"))]
    assert len({first, *others}) == len(made) == 4
    first.unlink()
    assert kept.kept(folder, ["a", "b"], ".x", make).read_text() == "text"


def test_what_fails_leaves_nothing(tmp_path):
    def make(path):
        path.write_text("half")
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            kept.kept(tmp_path, ["a"], "", make)
    assert not list(tmp_path.iterdir())


def test_machine_code_is_that_of_the_compiler(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    from rawflash.backends.cupy_raw import compile

    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    first, now = kept.compile_log(TEXT, "sm_90a"), compile.compile_log(TEXT, "sm_90a")
    assert first[0] == now[0] and compile.usage(first[1]) == compile.usage(now[1]) != {}  # logs have a time in them
    monkeypatch.setattr(compile, "compile_log", lambda text, arch: (b"other", f"of {text} for {arch}"))
    assert kept.compile_log(TEXT, "sm_90a") == first
    for text, arch in ((TEXT, "sm_80"), (TEXT + " ", "sm_90a")):
        assert kept.compile_log(text, arch) == (b"other", f"of {text} for {arch}")
    for name, value in (("_compiler", lambda: "NVRTC 99"), ("OPTIONS", ("--none",))):
        with monkeypatch.context() as patch:
            patch.setattr(compile, name, value)
            assert kept.compile_log(TEXT, "sm_90a")[0] == b"other"


def test_machine_code_is_that_of_a_kernel(tmp_path, monkeypatch):
    class Module:
        def __init__(self, key):
            self.key = key

        def key_of(self, name):
            return self.key + name

        def compiled(self, name):
            return self.key.encode() + b"\n\0", name

    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    assert kept.compiled(Module("a"), "n") == (b"a\n\0", "n")
    monkeypatch.setattr(Module, "compiled", lambda self, name: (b"other", ""))
    assert kept.compiled(Module("a"), "n") == (b"a\n\0", "n")
    assert kept.compiled(Module("b"), "n") == kept.compiled(Module("a"), "m") == (b"other", "")
