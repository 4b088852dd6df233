from plurax.execute.export_predict import export_predict as export_predict
from plurax.weights.by_path import labels as labels
from plurax.weights.read import load as load
from plurax.weights.write import save as save
