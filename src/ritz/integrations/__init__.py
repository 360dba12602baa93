"""ritz inside other people's training: a tracker for any loop, callbacks for trainers, adapters for loggers.

    track.py           `ritz.track`: curvature along any training loop, for a bounded share of its time
    forecast.py        what a look will take, before the first is made
    lightning.py       the same as a callback of Lightning
    transformers.py    the same as a callback of Hugging Face's Trainer; language models as a `ritz.Risk`
    loggers.py         TensorBoard, Weights & Biases, MLflow and Trackio behind one method, log(scalars, step)

No package of another house is imported before it is used.
"""
