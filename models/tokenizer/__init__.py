"""Text to token ids and back; tokenizers from a Hugging Face directory or a GGUF file.

Not here: chat templates (`models.chat`), and which file a model name stands for
(`models.pretrained`).
"""

from models.tokenizer.from_dir import tokenizer_from_dir as tokenizer_from_dir
from models.tokenizer.from_gguf import tokenizer_from_gguf as tokenizer_from_gguf
from models.tokenizer.tokenizer import StreamDecoder as StreamDecoder
from models.tokenizer.tokenizer import Tokenizer as Tokenizer
