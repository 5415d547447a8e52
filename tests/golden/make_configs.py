"""Writes configs/*/saved.json: published.json as transformers saves it, configs/golden.json: the same of the tiny
models beside this file, and configs/classes.json: what each configuration class has where a file says nothing.

Run with an environment that has torch and transformers 5: python tests/golden/make_configs.py
"""

import dataclasses
import json
import pathlib
import tempfile

import torch
import transformers

FOLDER = pathlib.Path(__file__).with_name("configs")
RULES = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")  # save_pretrained moves them to this file
UNKNOWN = ("kimi_k2", "bailing_moe", "bailing_moe_v2")  # models whose type transformers does not know


def model_class(config: transformers.PretrainedConfig) -> type:
    """The class of the architecture that the file names, or the one that transformers has in its place."""
    if config.model_type == "dots3_note":  # the name that its files have is that of its text part alone
        return transformers.Dots3NoteForConditionalGeneration
    name = config.architectures[0]
    others = {"KimiK25": "Kimi_K25", "5_For": "5For", "MoEFor": "MoeFor", "BailingMoeV3": "BailingHybrid"}
    others |= {"InternLM3": "Llama", "IQuestCoder": "Llama", "SarvamMoE": "Glm4Moe", "SarvamMLA": "DeepseekV3"}
    for candidate in (name, *(name.replace(*pair) for pair in others.items())):
        if hasattr(transformers, candidate):
            return getattr(transformers, candidate)
    raise ValueError(f"transformers has no {name}")


def saved(published: dict) -> dict:
    """What save_pretrained writes of a model of this configuration. No weights are made."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(published))
        config = transformers.AutoConfig.from_pretrained(folder)
        quantization = getattr(config, "quantization_config", None)
        with torch.device("meta"):
            model = model_class(config)(config)
        model.config.architectures = [type(model).__name__]
        if quantization is not None:
            model.config.quantization_config = quantization
        model.config.save_pretrained(folder)
        form = json.loads((pathlib.Path(folder) / "config.json").read_text())
        form.get("text_config", {}).pop("_name_or_path", None)  # of the temporary folder
        return form


def class_fields(config_class: type[transformers.PretrainedConfig]) -> dict:
    """A configuration class's own fields with their defaults, the other names that it knows for them, and its RoPE
    base. A default of null is one that the class derives from other fields.
    """
    own = {name: field.default for name, field in config_class.__dataclass_fields__.items()}
    base = transformers.PretrainedConfig.__dataclass_fields__
    fields = {name: value for name, value in own.items() if name not in base}
    fields = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    known = json.loads(config_class().to_json_string(use_diff=False))
    fields |= {name: None for name in known if name not in fields and name not in base}  # derived ones
    extra = {"rope_theta": config_class.default_theta} if "rope_parameters" in own else {}
    return {"fields": fields | extra, "aliases": config_class.attribute_map}


def write(path: pathlib.Path, values: dict) -> None:
    """A line for each key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    path.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    types = set()
    for path in sorted(FOLDER.glob("*/published.json")):
        published = json.loads(path.read_text())
        if published["model_type"] in UNKNOWN:
            continue
        form = saved(published)
        write(path.with_name("saved.json"), form)
        if rules := {name: published[name] for name in RULES if published.get(name) is not None}:
            write(path.with_name("generation_config.json"), rules)
        types.add(form.get("text_config", form)["model_type"])
    found = sorted(FOLDER.parent.rglob("config.json"))
    tiny = [path for path in found if FOLDER not in path.parents and not path.parent.name.endswith("_Dense")]
    forms = {path.parent.relative_to(FOLDER.parent).as_posix(): json.loads(path.read_text()) for path in tiny}
    known = {name: form for name, form in forms.items() if form["model_type"] not in UNKNOWN}
    write(FOLDER / "golden.json", {name: saved(form) for name, form in known.items()})
    write(FOLDER / "classes.json", {name: class_fields(transformers.CONFIG_MAPPING[name]) for name in sorted(types)})
