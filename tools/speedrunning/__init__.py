"""Parts of tools.speedrun: what follows from the depth, the commands, the price, the report. Imports no torch."""
