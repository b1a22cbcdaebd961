"""A process that claims memory until it is told to end: ``python claiming.py FOLDER GROUP HELD LOAD GROWTH``."""

import sys
from pathlib import Path

from splitinfer.system.ledger import Ledger

folder, (group, held, load, growth) = Path(sys.argv[1]), map(int, sys.argv[2:])
Ledger(folder, group).claim("stage", held=held, load=load, growth=growth)
sys.stdout.write("claimed\n")
sys.stdout.flush()
sys.stdin.read()
