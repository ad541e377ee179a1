"""GGUF files, dequantised once into a plain model directory."""

import io
import shutil
import struct
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import torch
from safetensors import SafetensorError

from tessera_cli.errors import ModelError, RunError


def convert_gguf(file: Path, target: Path) -> None:
    """Dequantise `file` into the float32 model directory `target`, which appears whole or not at all.

    transformers reads the file, its configuration and its tokenizer. The model that it returns carries the
    file's quantiser and refuses to be saved, so the weights are loaded into a plain one.

    Raises:
        ModelError: the file is damaged, of an unsupported architecture, or the `gguf` package is missing.
        RunError: no space to write to.
    """
    try:
        import gguf  # noqa: F401  (transformers asks for it late and less clearly)
    except ImportError:
        raise ModelError(
            f"{file} is a GGUF file and the package `gguf` is not installed",
            hint="pip install 'tessera-cli[gguf]'",
        ) from None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        try:
            # transformers draws a bar here, terminal or not.
            with redirect_stderr(io.StringIO()):
                source = AutoModelForCausalLM.from_pretrained(
                    file.parent, gguf_file=file.name, dtype=torch.float32
                )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except (ValueError, OSError, LookupError, OverflowError, struct.error) as error:
            raise ModelError(f"{file} cannot be read as a GGUF model: {error}") from error
        config = source.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(source)(config)
        plain.load_state_dict(source.state_dict())
        plain.tie_weights()
        try:
            plain.save_pretrained(work)
            tokenizer.save_pretrained(work)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"cannot write {target}: {error}", hint="free space, or set TESSERA_HOME"
            ) from error
        work.chmod(0o755)
        if not target.is_dir():  # another process may have been first
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
