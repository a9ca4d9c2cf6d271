"""The places of work: items, spans, tables of packed rows, splits, and the residuals of a forward."""
