"""The parts of `cpmrt train-draft`: target, generation, draft, training, acceptance, files."""
