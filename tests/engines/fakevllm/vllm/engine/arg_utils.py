from ..client import AsyncEngineArgs as AsyncEngineArgs
