"""The text of the formula."""

from collections.abc import Iterable
from dataclasses import dataclass

from formula.lock import Archive

PYTHON = "3.14"  # Homebrew's `mlx` is built for it
OF_HOMEBREW = {
    "mlx": "mlx",
    "mlx-metal": "mlx",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic-core": "pydantic",
}
"""Packages that are formulae of homebrew-core, which the environment sees: they are no resources."""

_BUILD = ("cmake", "pkgconf", "rust")  # for pyzmq; for libraries; for tokenizers, safetensors and hf-xet
_LIBRARIES = ("libyaml", "protobuf", "sentencepiece", "zeromq")


@dataclass(frozen=True, slots=True)
class Release:
    """A released version of splitinfer itself. homepage: its address; archive: its source archive."""

    homepage: str
    archive: Archive


def formula(release: Release, resources: Iterable[Archive]) -> str:
    """The formula of a release, with a resource for each archive."""
    return f"""\
class Splitinfer < Formula
  include Language::Python::Virtualenv

  desc "Run one large language model across several Macs, cut by layers"
  homepage {_string(release.homepage)}
  url {_string(release.archive.url)}
  sha256 {_string(release.archive.sha256)}
  license "MIT"

{_dependencies()}
{"".join(map(_resource, resources))}  def install
    virtualenv_install_with_resources
  end

  service do
    run [opt_bin/"splitinfer", "worker", "--host", "0.0.0.0"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/splitinfer-worker.log"
    error_log_path var/"log/splitinfer-worker.log"
  end

  def caveats
    <<~EOS
      Both ends of a link need the same version of MLX: install splitinfer with Homebrew on all machines of a
      pipeline, or on none. Before `brew services start splitinfer`, admit the coordinator: splitinfer pair KEY
    EOS
  end

  test do
    assert_match {_string("splitinfer " + release.archive.version)}, shell_output("#{{bin}}/splitinfer --version")
    answer = shell_output("#{{bin}}/splitinfer coord --layout demo.yaml --raw --max-tokens 8 --prompt 'The wolf'")
    refute_empty answer.strip
  end
end
"""


def _dependencies() -> str:
    formulae = sorted({*OF_HOMEBREW.values(), *_LIBRARIES, f"python@{PYTHON}"})
    lines = [f"depends_on {_string(each)} => :build" for each in _BUILD]
    lines += ["depends_on arch: :arm64", "depends_on macos: :sonoma"]
    lines += [f"depends_on {_string(each)}" for each in formulae]
    left_out = " ".join(sorted(OF_HOMEBREW))
    return "".join(f"  {line}\n" for line in lines) + f"\n  pypi_packages exclude_packages: %w[{left_out}]\n"


def _resource(archive: Archive) -> str:
    return f"""\
  resource {_string(archive.name)} do
    url {_string(archive.url)}
    sha256 {_string(archive.sha256)}
  end

"""


def _string(text: str) -> str:
    """A string of Ruby's in double quotes, in which # would begin an expression."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("#", "\\#") + '"'
