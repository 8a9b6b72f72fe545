"""`accelerate launch -m fourfold task=...` and `python -m fourfold ...`."""

from fourfold.cli import main

main()
