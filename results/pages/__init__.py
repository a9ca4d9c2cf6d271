"""The pages of results/, made of the stored runs beside them: plain functions, one for each section."""
