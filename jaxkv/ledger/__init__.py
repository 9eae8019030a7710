"""The ledger: exact bytes of a model's cache and weights, and its multiply-adds. It needs no JAX.

model = preset("llama-2-7b")                     # or load_config(path)
ledger = CacheLedger.of(model, "bf16")
ledger.sequence_bytes(32_768)                    # 16 GiB
ledger.crossing_context(weight_bytes(model))     # at 25,697 tokens: as much as the weights
"""

from jaxkv.ledger.compute import Macs as Macs
from jaxkv.ledger.compute import arithmetic_intensity as arithmetic_intensity
from jaxkv.ledger.compute import decode_macs as decode_macs
from jaxkv.ledger.compute import generation_macs as generation_macs
from jaxkv.ledger.compute import prefill_macs as prefill_macs
from jaxkv.ledger.compute import simulate as simulate
from jaxkv.ledger.config_json import load_config as load_config
from jaxkv.ledger.config_json import model_from_config as model_from_config
from jaxkv.ledger.errors import LedgerError as LedgerError
from jaxkv.ledger.memory import WEIGHT_BITS as WEIGHT_BITS
from jaxkv.ledger.memory import CacheLedger as CacheLedger
from jaxkv.ledger.memory import step_seconds as step_seconds
from jaxkv.ledger.memory import weight_bytes as weight_bytes
from jaxkv.ledger.presets import preset as preset
from jaxkv.ledger.presets import preset_names as preset_names
from jaxkv.ledger.shapes import Model as Model
from jaxkv.ledger.units import UNITS as UNITS
from jaxkv.ledger.units import parse_bytes as parse_bytes
from jaxkv.ledger.units import parse_rate as parse_rate
from jaxkv.ledger.units import parse_tokens as parse_tokens
