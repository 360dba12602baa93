"""ritz inside other people's training: a tracker for any loop, callbacks for trainers, adapters for loggers.

    track.py           `ritz.track`: curvature along any training loop, for a bounded share of its time
    forecast.py        the time of a look, forecast before the first one
    lightning.py       `ritz.track` as a callback of Lightning
    transformers.py    `ritz.track` as a callback of Hugging Face's Trainer; language models as a `ritz.Risk`
    loggers.py         TensorBoard, Weights & Biases, MLflow and Trackio with one method, log(scalars, step)

No third-party package is imported before it is used.
"""
