"""The name of a CPU's model. On x86 the kernel has it; on Arm it has only numbers, which a table here maps to names."""

ARM = {  # (implementer, part): MIDR_EL1 of Arm's and Ampere's reference manuals
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd8e"): "Arm Neoverse N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1A",
}


def model_name(about: dict[str, str]) -> str:
    """The model's name from the entries of one CPU in /proc/cpuinfo; "" if they lack it."""
    if name := about.get("model name"):
        return name[:80]
    numbers = about.get("CPU implementer", "")[:10], about.get("CPU part", "")[:10]
    if not all(numbers):
        return ""
    return ARM.get(numbers, "Arm implementer {}, part {}".format(*numbers))
