"""Random models like bge-m3, and their outputs by its published recipe.

The recipe is stated in transformers, after inference/embedder/encoder_only/m3.py and
finetune/embedder/encoder_only/m3/modeling.py of FlagEmbedding.
"""

import numpy as np
import torch
import transformers
from torch import nn

from tests.checkpoints import SPECIAL_TOKENS, module, pooling_files, set_fields, write_file
from tests.closeness import assert_close

FEATURES = 16
_UNWEIGHTED = ("cls", "eos", "pad", "unk")
_HEADS = {"sparse_linear": 1, "colbert_linear": FEATURES}


def save_m3(folder):
    """Give a saved encoder the heads of bge-m3, pickled, and its modules."""
    modules = [*pooling_files()["modules.json"], module("Normalize", "2_Normalize")]
    write_file(folder, "modules.json", modules)
    write_file(folder, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    set_fields(folder, "tokenizer_config.json", eos_token="[SEP]", model_max_length=60, **names)
    torch.manual_seed(1)
    for name, features in _HEADS.items():
        torch.save(nn.Linear(24, features).state_dict(), folder / f"{name}.pt")
    return folder


class M3Recipe:
    """The outputs of texts, each alone."""

    def __init__(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.unweighted = {getattr(self.tokenizer, f"{name}_token_id") for name in _UNWEIGHTED}
        self.heads = {}
        for name, features in _HEADS.items():
            self.heads[name] = nn.Linear(24, features)
            state = torch.load(folder / f"{name}.pt", weights_only=True)
            self.heads[name].load_state_dict(state)

    def of_texts(self, texts):
        """Return the outputs of texts, see `of_ids`."""
        return [self.of_ids(self.tokenizer(text)["input_ids"]) for text in texts]

    @torch.inference_mode()
    def of_ids(self, ids, model=None):
        """Return the outputs of token ids by task; weights of terms by their numbers.

        Args:
            model: the encoder; None is the checkpoint's.
        """
        hidden = (model or self.model)(input_ids=torch.tensor([ids])).last_hidden_state[0]
        largest = {}
        for token, weight in zip(
            ids, self.heads["sparse_linear"](hidden)[:, 0].tolist(), strict=True
        ):
            if token not in self.unweighted and weight > 0:
                largest[token] = max(weight, largest.get(token, 0.0))
        vectors = self.heads["colbert_linear"](hidden[1:])
        return {
            "embed": nn.functional.normalize(hidden[0], dim=0),
            "sparse_embed": largest,
            "token_embed": nn.functional.normalize(vectors, dim=1),
            "hidden": hidden,
        }


def check_output(task, output, expected, roundings):
    """Compare an output of a text with the recipe's.

    Args:
        output: array of the engine, which is `[terms, 2]` for terms; or the client's `SparseVector`.
    """
    if task != "sparse_embed":
        assert_close(output, expected, roundings=roundings)
        return
    pairs = output.T if isinstance(output, np.ndarray) else (output.indices, output.values)
    found = dict(zip(pairs[0].astype(int).tolist(), pairs[1].tolist(), strict=True))
    # a weight that is nearly 0 may be there or not
    terms = sorted(found.keys() | expected.keys())
    values = ([each.get(term, 0.0) for term in terms] for each in (found, expected))
    assert_close(*values, roundings=roundings)
    assert (np.diff(pairs[1]) <= 0).all()
