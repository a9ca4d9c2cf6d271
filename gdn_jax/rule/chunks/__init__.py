"""The parts of the chunked form."""
