"""One folder a method. ``from assay.methods.vattention import vattention``."""
