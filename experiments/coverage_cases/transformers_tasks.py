"""More architectures of transformers, as ``transformers_models``: decoders with states, detectors, segmentation, video, audio, time series."""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from experiments.coverage_cases.made import Build
from experiments.coverage_cases.transformers_models import (
    _GROUPED,
    _TINY,
    _VISION,
    _VOCABULARY,
    _big_pixels,
    _build,
    _Inputs,
    _pair,
    _pixels,
    _tokens,
)

_UNCACHED: dict[str, Any] = {**_GROUPED, "use_cache": False}
_SSD: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1, "mamba_expand": 2,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
_SMALL: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_RESNET: dict[str, Any] = {"model_type": "resnet", **_SMALL, "embedding_size": 8, "out_features": ["stage2", "stage3", "stage4"]}
_RT_RESNET: dict[str, Any] = {
    "model_type": "rt_detr_resnet", **_SMALL, "embedding_size": 8, "out_indices": [2, 3, 4], "layer_type": "basic",
}  # fmt: skip
_HGNET: dict[str, Any] = {
    "model_type": "hgnet_v2", "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 24, 32], "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 24, 32, 40], "hidden_sizes": [16, 24, 32, 40], "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2], "out_indices": [2, 3, 4],
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "model_type": "swin", "image_size": 64, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 4,
}  # fmt: skip
_DETR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_queries": 6,
}  # fmt: skip
_DINO: dict[str, Any] = {
    "model_type": "dinov2", **_VISION, "out_indices": [1, 2, 3, 4], "num_hidden_layers": 4, "reshape_hidden_states": False,
}  # fmt: skip
_BEIT: dict[str, Any] = {**_DINO, "model_type": "beit", "use_relative_position_bias": True}
_DEPTH: dict[str, Any] = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
_HIERA: dict[str, Any] = {
    "model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [64, 64], "embed_dim_per_stage": [8, 16, 24, 32],
    "num_attention_heads_per_stage": [1, 2, 2, 2], "blocks_per_stage": [1, 1, 2, 1], "window_size_per_stage": [4, 4, 4, 4],
    "global_attention_blocks": [3], "window_positional_embedding_background_size": [4, 4],
}  # fmt: skip
_SAM2: dict[str, Any] = {
    "vision_config": {
        "backbone_config": _HIERA, "backbone_channel_list": [32, 24, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32, "num_attention_heads": 4},
}  # fmt: skip
_MASK2FORMER: dict[str, Any] = {
    "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, "hidden_dim": 32, "feature_size": 32,
    "mask_feature_size": 32, "encoder_layers": 1, "decoder_layers": 3, "num_attention_heads": 4, "dim_feedforward": 64,
    "encoder_feedforward_dim": 64, "num_queries": 6,
}  # fmt: skip
_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 1, "d_model": 16, "scaling": "mean",
    "use_cache": False,
}  # fmt: skip
_PATCHES: dict[str, Any] = {
    "patch_length": 8, "context_length": 32, "horizon_length": 8, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def _ids() -> dict[str, Any]:
    return {"input_ids": _tokens()["input_ids"]}


def _masked_pixels() -> dict[str, Any]:
    return {**_big_pixels(), "pixel_mask": torch.ones(1, 64, 64, dtype=torch.long)}


def _page() -> dict[str, Any]:
    return {**_tokens(), "bbox": torch.tensor([5, 6, 40, 50]).expand(2, 12, 4).clone(), "pixel_values": torch.randn(2, 3, 32, 32)}


def _patches_of_a_picture() -> dict[str, Any]:
    mask = (torch.arange(16) < 12).long()[None]
    shapes = {"pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[3, 4]])}
    return {"input_ids": _tokens()["input_ids"][:1], "pixel_values": torch.randn(1, 16, 192), **shapes}


def _points() -> dict[str, Any]:
    return {**_big_pixels(), "input_points": torch.rand(1, 1, 2, 2) * 60, "input_labels": torch.ones(1, 1, 2, dtype=torch.long)}


def _frames() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 4, 3, 32, 32)}


def _series() -> dict[str, Any]:
    past = {"past_values": torch.rand(2, 15), "past_time_features": torch.rand(2, 15, 1), "past_observed_mask": torch.ones(2, 15)}
    return {**past, "future_values": torch.rand(2, 4), "future_time_features": torch.rand(2, 4, 1)}


_MODELS: dict[str, tuple[str, dict[str, Any], _Inputs]] = {
    "gemma3-cache": ("Gemma3ForCausalLM", {**_GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}, _tokens),
    "lfm2-cache": ("Lfm2ForCausalLM", {**_GROUPED, "layer_types": ["conv", "full_attention"]}, _tokens),
    "falcon-h1": ("FalconH1ForCausalLM", {**_UNCACHED, **_SSD, "mamba_d_ssm": 64}, _tokens),
    "mamba2": ("Mamba2ForCausalLM", {**_MAMBA2, "use_cache": False}, _tokens),
    "mamba2-cache": ("Mamba2ForCausalLM", _MAMBA2, _tokens),
    "jamba": ("JambaForCausalLM", {**_UNCACHED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}, _tokens),
    "zamba2": ("Zamba2ForCausalLM", {**_TINY, "use_cache": False, "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_headdim": 16, "chunk_size": 4, "layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}, _tokens),
    "recurrent-gemma": ("RecurrentGemmaForCausalLM", {**_TINY, "num_key_value_heads": 1, "attention_window_size": 6, "use_cache": False, "num_hidden_layers": 3}, _tokens),
    "qwen3-next": ("Qwen3NextForCausalLM", {**_UNCACHED, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}, _tokens),
    "gpt-oss": ("GptOssForCausalLM", {**_UNCACHED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}, _tokens),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**_TINY, "use_cache": False, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}, _tokens),
    "xlstm": ("xLSTMForCausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "chunk_size": 4, "use_cache": False}, _ids),
    "esm": ("EsmForMaskedLM", {**_TINY, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True}, _tokens),
    "layoutlmv3": ("LayoutLMv3Model", {**_TINY, "input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4}, _page),
    "deberta": ("DebertaModel", {**_TINY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}, _tokens),
    "xlnet": ("XLNetModel", {"vocab_size": _VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, _tokens),
    "reformer": ("ReformerModel", {"vocab_size": _VOCABULARY, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 64, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "max_position_embeddings": 16}, lambda: {"input_ids": torch.randint(3, 99, (1, 16))}),
    "longt5": ("LongT5Model", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False, "local_radius": 3}, _pair),
    "perceiver": ("PerceiverModel", {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4}, lambda: {"inputs": torch.randn(1, 16, 32)}),
    "rt-detr-v2": ("RTDetrV2ForObjectDetection", {**_DETR, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32, 32, 32], "backbone_config": _RT_RESNET}, _big_pixels),
    "d-fine": ("DFineForObjectDetection", {**_DETR, "encoder_hidden_dim": 32, "encoder_in_channels": [24, 32, 40], "decoder_in_channels": [32, 32, 32], "backbone_config": _HGNET, "depth_mult": 0.34}, _big_pixels),
    "deformable-detr": ("DeformableDetrForObjectDetection", {**_DETR, "backbone_config": _RESNET, "num_feature_levels": 3}, _masked_pixels),
    "grounding-dino": ("GroundingDinoForObjectDetection", {**_DETR, "num_feature_levels": 3, "backbone_config": {**_SWIN, "out_features": ["stage2", "stage3", "stage4"]}, "text_config": {"model_type": "bert", **_TINY}, "max_text_len": 16}, lambda: {**_big_pixels(), "input_ids": torch.tensor([[2, 5, 6, 7, 9, 3]])}),
    "siglip2": ("Siglip2Model", {"text_config": _TINY, "vision_config": {**{k: v for k, v in _VISION.items() if k != "image_size"}, "num_patches": 16}}, _patches_of_a_picture),
    "dinov3": ("DINOv3ViTModel", {**_VISION, "num_register_tokens": 2}, _pixels),
    "depth-anything": ("DepthAnythingForDepthEstimation", {**_DEPTH, "backbone_config": _DINO, "patch_size": 8, "reassemble_hidden_size": 32, "head_hidden_size": 8}, _pixels),
    "zoedepth": ("ZoeDepthForDepthEstimation", {**_DEPTH, "backbone_config": _BEIT, "bottleneck_features": 8, "num_relative_features": 4, "bin_embedding_dim": 8, "num_attractors": [4, 4, 2, 1], "bin_configurations": [{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0}]}, _pixels),
    "hiera": ("HieraModel", {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "masked_unit_size": [8, 8]}, _big_pixels),
    "vitpose": ("VitPoseForPoseEstimation", {"backbone_config": {"model_type": "vitpose_backbone", "image_size": [32, 32], "patch_size": [8, 8], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "out_indices": [2]}, "use_simple_decoder": False}, _pixels),
    "sam2": ("Sam2Model", _SAM2, _points),
    "mask2former": ("Mask2FormerForUniversalSegmentation", _MASK2FORMER, _masked_pixels),
    "eomt": ("EomtForUniversalSegmentation", {**_VISION, "num_blocks": 1, "num_queries": 6, "num_upscale_blocks": 1}, _pixels),
    "superpoint": ("SuperPointForKeypointDetection", {"encoder_hidden_sizes": [8, 8, 8, 8], "decoder_hidden_size": 8, "descriptor_decoder_dim": 8}, _big_pixels),
    "swin2sr": ("Swin2SRForImageSuperResolution", {"image_size": 16, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}, lambda: {"pixel_values": torch.rand(1, 3, 16, 16)}),
    "swinv2": ("Swinv2Model", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}, _pixels),
    "videomae": ("VideoMAEModel", {**_VISION, "num_frames": 4}, _frames),
    "timesformer": ("TimesformerModel", {**_VISION, "num_frames": 4}, _frames),
    "vjepa2": ("VJEPA2Model", {"crop_size": 32, "patch_size": 8, "frames_per_clip": 4, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1}, lambda: {"pixel_values_videos": torch.randn(1, 4, 3, 32, 32)}),
    "pp-ocrv5-mobile-det": ("PPOCRV5MobileDetForObjectDetection", {}, lambda: {"pixel_values": torch.randn(1, 3, 96, 96)}),
    "moonshine": ("MoonshineForConditionalGeneration", {"vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "use_cache": False}, lambda: {"input_values": torch.randn(1, 4000), "decoder_input_ids": torch.randint(3, 99, (1, 5))}),
    "mimi": ("MimiModel", {"hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 16, "num_quantizers": 4, "vector_quantization_hidden_dimension": 16, "upsample_groups": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "frame_rate": 1500}, lambda: {"input_values": torch.randn(1, 1, 640)}),
    "dac": ("DacModel", {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 3, "codebook_size": 16, "codebook_dim": 4}, lambda: {"input_values": torch.randn(1, 1, 640)}),
    "clap-audio": ("ClapAudioModelWithProjection", {"spec_size": 64, "num_mel_bins": 16, "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16, "window_size": 4, "num_hidden_layers": 2, "projection_dim": 16}, lambda: {"input_features": torch.randn(1, 1, 250, 16), "is_longer": torch.tensor([[False]])}),
    "wav2vec2-bert": ("Wav2Vec2BertModel", {**_TINY, "feature_projection_input_dim": 24}, lambda: {"input_features": torch.randn(1, 20, 24)}),
    "parakeet": ("ParakeetForCTC", {"vocab_size": 33, "pad_token_id": 32, "encoder_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "subsampling_conv_channels": 8, "num_mel_bins": 16}}, lambda: {"input_features": torch.randn(1, 40, 16), "attention_mask": torch.ones(1, 40, dtype=torch.long)}),
    "speecht5-hifigan": ("SpeechT5HifiGan", {"model_in_dim": 16, "upsample_initial_channel": 32}, lambda: {"spectrogram": torch.randn(1, 12, 16)}),
    "univnet": ("UnivNetModel", {"model_in_channels": 8, "model_hidden_channels": 8, "num_mel_bins": 16, "kernel_predictor_hidden_channels": 8}, lambda: {"input_features": torch.randn(1, 12, 16), "noise_sequence": torch.randn(1, 12, 8)}),
    "vits": ("VitsModel", {"hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 32, "flow_size": 16, "upsample_initial_channel": 32, "spectrogram_bins": 9, "duration_predictor_filter_channels": 16}, lambda: {"input_ids": torch.randint(1, 38, (1, 10))}),
    "timesfm-2.5-forecast": ("TimesFm2_5ModelForPrediction", _PATCHES, lambda: {"past_values": [torch.randn(32), torch.randn(32)]}),
    "patchtsmixer": ("PatchTSMixerForPrediction", {"context_length": 32, "num_input_channels": 2, "prediction_length": 4, "loss": "mse"}, lambda: {"past_values": torch.randn(2, 32, 2)}),
    "time-series-transformer": ("TimeSeriesTransformerModel", _SERIES, _series),
    "informer": ("InformerModel", _SERIES, _series),
}  # fmt: skip


def cases() -> dict[str, Build]:
    """Case name to builder."""
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    # Which transformers looks at when it is there.
    import_torchvision()
    import transformers  # noqa: F401

    return {f"transformers:{name}": partial(_build, *item) for name, item in _MODELS.items()}
