"""What is saved in tests of other rooms is fetched here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "orbax"))
