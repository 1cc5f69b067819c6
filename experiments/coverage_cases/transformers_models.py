"""Architectures of transformers from tiny configurations with random weights; outputs are transformers' own containers."""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.coverage_cases.made import Build, Made

_VOCABULARY = 99
_TINY: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_TINY, "num_key_value_heads": 2, "head_dim": 8}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16),
    "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
}  # fmt: skip

_Inputs = Callable[[], dict[str, Any]]


def _tokens() -> dict[str, Any]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(3, _VOCABULARY, (2, 12)), "attention_mask": mask}


def _pair() -> dict[str, Any]:
    return {**_tokens(), "decoder_input_ids": torch.randint(3, _VOCABULARY, (2, 7))}


def _filled(cache: Any, heads: int, length: int = 16) -> Any:
    """A cache of a decoder of two layers after so many tokens."""
    for layer in range(2):
        cache.update(torch.randn(2, heads, length, 8), torch.randn(2, heads, length, 8), layer)
    return cache


def _step(heads: int = 2, tokens: int = 1) -> dict[str, Any]:
    from transformers import DynamicCache

    return {"input_ids": torch.randint(3, _VOCABULARY, (2, tokens)), "past_key_values": _filled(DynamicCache(), heads)}


def _first_step() -> dict[str, Any]:
    from transformers import DynamicCache

    return {**_tokens(), "past_key_values": DynamicCache()}


def _sliding_step() -> dict[str, Any]:
    from transformers import DynamicCache, MistralConfig

    cache = DynamicCache(config=MistralConfig(**_GROUPED, sliding_window=6))
    return {"input_ids": torch.randint(3, _VOCABULARY, (2, 1)), "past_key_values": _filled(cache, 2)}


def _static_step() -> dict[str, Any]:
    from transformers import LlamaConfig, StaticCache

    cache = StaticCache(config=LlamaConfig(**_GROUPED), max_cache_len=24)
    return {"input_ids": torch.randint(3, _VOCABULARY, (2, 1)), "past_key_values": _filled(cache, 2)}


def _pair_step() -> dict[str, Any]:
    from transformers import DynamicCache, EncoderDecoderCache

    cache = EncoderDecoderCache(_filled(DynamicCache(), 4, 3), _filled(DynamicCache(), 4, 12))
    hidden = (torch.randn(2, 12, 32),)
    return {"encoder_outputs": hidden, "decoder_input_ids": torch.randint(3, _VOCABULARY, (2, 1)), "past_key_values": cache}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 32, 32)}


def _big_pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 64, 64)}


def _wave() -> dict[str, Any]:
    return {"input_values": torch.randn(1, 2000)}


def _text_and_pixels() -> dict[str, Any]:
    return {**_tokens(), "pixel_values": torch.randn(2, 3, 32, 32)}


# Case: (class of the model, its configuration, class of the configuration or "" for the model's own, inputs).
_MODELS: dict[str, tuple[str, dict[str, Any], _Inputs]] = {
    "bert": ("BertModel", _TINY, _tokens),
    "bert-mlm": ("BertForMaskedLM", _TINY, _tokens),
    "bert-all-outputs": ("BertModel", {**_TINY, "output_hidden_states": True, "output_attentions": True}, _tokens),
    "bert-tuple": ("BertModel", {**_TINY, "return_dict": False}, _tokens),
    "roberta": ("RobertaForSequenceClassification", _TINY, _tokens),
    "electra": ("ElectraForTokenClassification", {**_TINY, "embedding_size": 16}, _tokens),
    "albert": ("AlbertModel", {**_TINY, "embedding_size": 16}, _tokens),
    "distilbert": ("DistilBertForQuestionAnswering", {"vocab_size": _VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, _tokens),
    "deberta-v2": ("DebertaV2Model", {**_TINY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _tokens),
    "mpnet": ("MPNetModel", _TINY, _tokens),
    "mobilebert": ("MobileBertModel", {**_TINY, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}, _tokens),
    "squeezebert": ("SqueezeBertModel", {**_TINY, "embedding_size": 32}, _tokens),
    "modernbert": ("ModernBertModel", {**_TINY, "cls_token_id": 1, "sep_token_id": 2}, _tokens),
    "funnel": ("FunnelModel", {"vocab_size": _VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]}, _tokens),
    "fnet": ("FNetModel", {**_TINY, "tpu_short_seq_length": 12}, lambda: {"input_ids": _tokens()["input_ids"]}),
    "longformer": ("LongformerModel", {**_TINY, "attention_window": 4}, _tokens),
    "bigbird": ("BigBirdModel", {**_TINY, "attention_type": "original_full"}, _tokens),
    "convbert": ("ConvBertModel", {**_TINY, "embedding_size": 32, "head_ratio": 2}, _tokens),
    "layoutlm": ("LayoutLMModel", _TINY, lambda: {**_tokens(), "bbox": torch.tensor([5, 6, 40, 50]).expand(2, 12, 4).clone()}),
    "gpt2": ("GPT2LMHeadModel", {**_TINY, "use_cache": False}, _tokens),
    "gpt2-cache": ("GPT2LMHeadModel", _TINY, _tokens),
    "gpt2-decode": ("GPT2LMHeadModel", _TINY, lambda: _step(4)),
    "gpt-neox": ("GPTNeoXForCausalLM", {**_TINY, "use_cache": False}, _tokens),
    "gptj": ("GPTJForCausalLM", {**_TINY, "rotary_dim": 4, "use_cache": False}, _tokens),
    "opt": ("OPTForCausalLM", {**_TINY, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}, _tokens),
    "bloom": ("BloomForCausalLM", {**_TINY, "use_cache": False}, _tokens),
    "llama": ("LlamaForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "llama-cache": ("LlamaForCausalLM", _GROUPED, _tokens),
    "llama-decode": ("LlamaForCausalLM", _GROUPED, _step),
    "llama-chunk": ("LlamaForCausalLM", _GROUPED, lambda: _step(tokens=3)),
    "llama-into-empty-cache": ("LlamaForCausalLM", _GROUPED, _first_step),
    "llama-static-cache": ("LlamaForCausalLM", _GROUPED, _static_step),
    "mistral-cache": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 6}, _tokens),
    "mistral-decode": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 6}, _sliding_step),
    "gemma2-cache": ("Gemma2ForCausalLM", _GROUPED, _tokens),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "use_cache": False, "sliding_window": 6}, _tokens),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "use_cache": False, "num_local_experts": 4, "num_experts_per_tok": 2}, _tokens),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "phi": ("PhiForCausalLM", {**_TINY, "use_cache": False}, _tokens),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "falcon": ("FalconForCausalLM", {**_TINY, "use_cache": False, "alibi": False}, _tokens),
    "stablelm": ("StableLmForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "olmo": ("OlmoForCausalLM", {**_GROUPED, "use_cache": False}, _tokens),
    "mamba": ("MambaForCausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}, _tokens),
    "mamba-cache": ("MambaForCausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, _tokens),
    "rwkv": ("RwkvModel", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "use_cache": False}, lambda: {"input_ids": _tokens()["input_ids"]}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False, "decoder_start_token_id": 0}, _pair),
    "t5-cache": ("T5Model", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, _pair),
    "t5-decode": ("T5ForConditionalGeneration", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, _pair_step),
    "t5-encoder": ("T5EncoderModel", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, _tokens),
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ, "use_cache": False}, _pair),
    "mbart": ("MBartModel", {**_SEQ2SEQ, "use_cache": False}, _pair),
    "pegasus": ("PegasusModel", {**_SEQ2SEQ, "use_cache": False}, _pair),
    "marian": ("MarianModel", {**_SEQ2SEQ, "use_cache": False}, _pair),
    "vit": ("ViTForImageClassification", _VISION, _pixels),
    "deit": ("DeiTModel", _VISION, _pixels),
    "beit": ("BeitModel", _VISION, _pixels),
    "dinov2": ("Dinov2Model", _VISION, _pixels),
    "swin": ("SwinModel", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}, _pixels),
    "convnext": ("ConvNextModel", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, _pixels),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, _pixels),
    "mobilevit": ("MobileViTModel", {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}, _big_pixels),
    "segformer": ("SegformerForSemanticSegmentation", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}, _big_pixels),
    "dpt": ("DPTForDepthEstimation", {**_VISION, "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "is_hybrid": False}, _pixels),
    "vitmae": ("ViTMAEModel", {**_VISION, "mask_ratio": 0.0}, _pixels),
    "yolos": ("YolosModel", {**_VISION, "image_size": [32, 32], "num_detection_tokens": 4}, _pixels),
    "wav2vec2": ("Wav2Vec2ForCTC", _SPEECH, _wave),
    "hubert": ("HubertModel", _SPEECH, _wave),
    "wavlm": ("WavLMModel", _SPEECH, _wave),
    "whisper": ("WhisperForConditionalGeneration", {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20, "use_cache": False}, lambda: {"input_features": torch.randn(1, 16, 40), "decoder_input_ids": torch.randint(3, _VOCABULARY, (1, 5))}),
    "ast": ("ASTModel", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 8, "max_length": 32, "num_mel_bins": 16}, lambda: {"input_values": torch.randn(1, 32, 16)}),
    "encodec": ("EncodecModel", {"num_filters": 4, "hidden_size": 16, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 16, "num_lstm_layers": 1}, lambda: {"input_values": torch.randn(1, 1, 640)}),
    "clip": ("CLIPModel", {"text_config": _TINY, "vision_config": _VISION, "projection_dim": 16}, _text_and_pixels),
    "siglip": ("SiglipModel", {"text_config": _TINY, "vision_config": _VISION}, _text_and_pixels),
    "vilt": ("ViltModel", {**_TINY, "image_size": 32, "patch_size": 8}, _text_and_pixels),
    "blip": ("BlipForImageTextRetrieval", {"text_config": {**_TINY, "encoder_hidden_size": 32}, "vision_config": _VISION, "projection_dim": 16, "image_text_hidden_size": 16}, _text_and_pixels),
    "flava": ("FlavaTextModel", _TINY, _tokens),
    "patchtst": ("PatchTSTModel", {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 32}, lambda: {"past_values": torch.randn(2, 32, 2)}),
}  # fmt: skip


def cases() -> dict[str, Build]:
    """Case name to builder."""
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    # Which transformers looks at when it is there.
    import_torchvision()
    import transformers  # noqa: F401

    return {f"transformers:{name}": partial(_build, *item) for name, item in _MODELS.items()}


def _build(name: str, options: dict[str, Any], inputs: _Inputs) -> Made:
    import transformers

    kind = getattr(transformers, name)
    # Its mixtures of experts call an operator of its own.
    return Made(kind(kind.config_class(**options)), (), inputs(), custom_operators=("transformers",))
