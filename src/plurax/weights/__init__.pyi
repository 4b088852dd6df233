from plurax.weights.by_path import labels as labels
from plurax.weights.read import load as load
from plurax.weights.write import save as save
