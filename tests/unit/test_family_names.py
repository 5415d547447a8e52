"""The table of the families' names has all files, and a start imports one of them."""

import subprocess
import sys

from ckdist.models import families
from ckdist.models.families import variants
from ckdist.models.registry import own_families
from tests.support.paths import ROOT

FOLDER = ROOT / "ckdist" / "models" / "families"


def test_the_table_has_every_family_and_each_name_once():
    assert set(families.NAMES) == {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "family", "variants"} | {
        *variants.CHANGES
    }
    assert len(families.FILES) == sum(len(names.partition(" =")[0].split()) for names in families.NAMES.values())


def test_the_page_of_families_has_every_architecture():
    page = (ROOT / "docs" / "families.md").read_text()
    for one in own_families().values():
        for name in (*one.architectures, *([one.gguf] if one.from_gguf else [])):
            assert f"`{name}`" in page, name


def test_a_name_imports_the_file_of_its_family_alone():
    script = (
        "import sys; from ckdist.models.registry import family; family('granite');"
        "print(*sorted(m.rpartition('.')[2] for m in sys.modules if m.startswith('ckdist.models.families.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["family", "granite", "llama"]
