"""`import horovod.mxnet` is one clear error: there is no front end for MXNet."""

raise ImportError(
    "horovod.mxnet: Apache MXNet was retired in 2023 and has no release for this Python; farandole has no front "
    "end for it. Use horovod.torch, horovod.tensorflow or horovod.keras.",
    name="horovod.mxnet",
)
