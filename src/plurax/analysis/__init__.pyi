from plurax.analysis.batch_size import FastestBatchSize as FastestBatchSize
from plurax.analysis.batch_size import MaxBatchSize as MaxBatchSize
from plurax.analysis.verify import Difference as Difference
from plurax.analysis.verify import Verification as Verification
from plurax.hlo import Collective as Collective
from plurax.hlo import Memory as Memory
from plurax.partition.partitioner import Record as Record
