from plurax.adapters import equinox as equinox
from plurax.adapters import haiku as haiku
from plurax.adapters import keras as keras
from plurax.adapters import linen as linen
from plurax.adapters import nnx as nnx
