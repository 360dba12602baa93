"""Numbers from operators: each a function, each result frozen, with its error bar and its cost."""
