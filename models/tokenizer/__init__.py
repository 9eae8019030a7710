"""Text to token ids and back; tokenizers from a Hugging Face directory or a GGUF file.

`jaxkv.models.chat` renders chat templates.
"""

from jaxkv.models.tokenizer.from_dir import tokenizer_from_dir as tokenizer_from_dir
from jaxkv.models.tokenizer.from_gguf import tokenizer_from_gguf as tokenizer_from_gguf
from jaxkv.models.tokenizer.tokenizer import StreamDecoder as StreamDecoder
from jaxkv.models.tokenizer.tokenizer import Tokenizer as Tokenizer
