"""The recurrent token mixers of a model: each an object that makes its layer and knows its costs."""
