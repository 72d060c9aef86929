from .values import PoolingParams as PoolingParams
