"""`ckdist export --gguf IN OUT.gguf`: writes a safetensors folder, or an adapter, as one GGUF file."""

from ckdist.config.commands import ExportCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import resolve
from ckdist.weights.gguf_export import export_gguf


def run(command: ExportCommand) -> int:
    """Writes the file. Returns 0. Raises ConfigError if an argument is missing."""
    if not command.gguf or command.source is None or command.target is None:
        raise ConfigError("export needs a format, a folder and a file: ckdist export --gguf IN OUT.gguf")
    source = resolve(command.source)
    if command.lora:
        from ckdist.weights.gguf_adapter_export import export_adapter

        size = export_adapter(source, command.lora, command.target)
        print(f"{command.target}: adapter, {size / 1e6:.1f} MB")
        return 0
    name = None if source == command.source else command.source.rsplit("/", 1)[-1]
    size = export_gguf(source, command.target, command.type, progress=True, name=name)
    print(f"{command.target}: {command.type}, {size / 1e6:.1f} MB")
    return 0
