"""From a model's name to a local directory in Hugging Face layout; torch is only loaded to convert."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from tessera_cli.errors import ModelError

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "README.md"]


Notify = Callable[[str], None]


def resolve_model(name: str, *, home: Path, offline: bool, notify: Notify | None = None) -> Path:
    """Find the model `name`: a directory, a hub id, a `.gguf` file, or `package:IMPORT_NAME/FILE.gguf`.

    A name that is an existing path, or starts like one, is local and never asked of the hub. A GGUF file is
    converted once, into `home`; `notify` hears of it first, since it takes a while. Returns a directory with
    config.json, tokenizer.json and safetensors.

    Raises:
        ModelError: there is no such model, or it cannot be read.
    """
    if name.startswith("package:"):
        return _converted(_in_package(name), home, notify)
    try:
        path = Path(name).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a directory closed to us, a ~user unknown
        raise ModelError(f"the model {name!r} cannot be looked up: {error}") from error
    if is_file:
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file, not a model", hint="name a model directory or a .gguf file")
        return _converted(path, home, notify)
    if is_dir and name:
        return path
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", "/")) or name.count("/") != 1:
        raise ModelError(
            f"no such model directory: {name or repr(name)}",
            hint="name a directory, a .gguf file, or a hub id like `org/model`",
        )
    return _from_hub(name, offline=offline)


def local_gguf(name: str) -> Path | None:
    """The GGUF file that the model `name` is read from, None for a directory or a hub id.

    Raises:
        ModelError: a package that is not installed, or holds no such file.
    """
    if name.startswith("package:"):
        return _in_package(name)
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def _in_package(name: str) -> Path:
    package, _, file = name.removeprefix("package:").partition("/")
    try:
        # `find_spec` locates the package without running it.
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:  # a module that was not imported as one, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the Python package {package!r} of {name} is not installed",
            hint="the quick-start teacher comes with `pip install 'tessera-cli[quickstart]'` or `make setup`",
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file() or path.suffix != ".gguf":
        raise ModelError(f"the package {package!r} holds no model {file!r}")
    return path


def _converted(file: Path, home: Path, notify: Notify | None) -> Path:
    """The conversion of a GGUF file, made now if it is not in `home`; named by the file's content."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = home / "models" / f"{file.stem}-{digest[:12]}"
    if not target.is_dir():
        from tessera_cli.models.gguf import convert_gguf

        if notify is not None:
            notify(
                f"converting {file.name} to safetensors in {target} (once, about half a minute per 100 MB)"
            )
        convert_gguf(file, target)
    return target


def _from_hub(name: str, *, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=offline))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = "is not in the local hub cache" if offline else "could not be fetched from the hub"
        raise ModelError(
            f"{name} is no local directory and {reason} ({type(error).__name__})",
            hint="check the name and the network, or name a local directory",
        ) from error
