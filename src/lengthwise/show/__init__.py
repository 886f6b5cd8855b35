"""`lengthwise show`: from the name of a model to a figure, to the interactive page, or to all figures of the paper."""
