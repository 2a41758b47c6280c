"""Small models of ``timm``, ``torchvision``, ``diffusers`` and ``torch_geometric``, with inputs of three sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Inputs = Callable[[int, int], dict[str, Any]]
    Made = tuple[Callable[[], torch.nn.Module], Inputs]

__all__ = ["MODELS"]

CHANNELS = 3


def _image(name: str, *, fixed: int | None = None) -> Inputs:
    """Square images: of eight times the length, or of one width."""
    return lambda batch, length: {
        name: torch.randn(batch, CHANNELS, fixed or 8 * length, fixed or 8 * length)
    }


# --- timm -------------------------------------------------------------------------------------------

TIMM = (
    "byobnet coatnet convnext convnext2 convnext3 efficientnet efficientnet_evos efficientnet_gn efficientnet_ln "
    "mambaout maxvit nfnet resnet vit vit2 vit3 vit4 vit_relpos"
)
"""Its models for tests: ``test_NAME``."""


def _timm(name: str) -> Made:
    import timm

    def make() -> Any:
        return timm.create_model(f"test_{name}", pretrained=False, num_classes=8)

    width = timm.get_pretrained_cfg(f"test_{name}").input_size[-1]
    return make, _image("x", fixed=width)


# --- torchvision ------------------------------------------------------------------------------------


def _torchvision() -> dict[str, Made]:
    import torchvision
    from torchvision import models
    from torchvision.models import convnext, densenet, maxvit, regnet, resnet, swin_transformer
    from torchvision.models.video import resnet as video

    def convolutional(make: Callable[[], torch.nn.Module], name: str = "x") -> Made:
        return make, _image(name)

    def fixed(width: int, make: Callable[[], torch.nn.Module]) -> Made:
        return make, _image("x", fixed=width)

    def clip(batch: int, length: int) -> dict[str, Any]:
        return {"x": torch.randn(batch, CHANNELS, length, 32, 32)}

    def r3d() -> torch.nn.Module:
        made = video.VideoResNet(
            video.BasicBlock, [video.Conv3DSimple] * 4, [1, 1, 1, 1], video.BasicStem, 8
        )
        made.layer3 = made.layer4 = torch.nn.Identity()  # which have most of the weights
        made.fc = torch.nn.Linear(128, 8)
        return made

    def swin(block: Any, downsample: Any) -> torch.nn.Module:
        return swin_transformer.SwinTransformer(
            [4, 4],
            24,
            [2, 2],
            [2, 4],
            [4, 4],
            num_classes=8,
            block=block,
            downsample_layer=downsample,
        )

    blocks = swin_transformer
    return {
        "alexnet_features": convolutional(lambda: models.AlexNet(8).features, "input"),
        "convnext": convolutional(
            lambda: convnext.ConvNeXt(
                [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)],
                num_classes=8,
            )
        ),
        "densenet": convolutional(lambda: densenet.DenseNet(8, (2, 2), 16, num_classes=8)),
        "efficientnet_b0": convolutional(lambda: models.efficientnet_b0(num_classes=8)),
        "lraspp_mobilenet_v3_large": convolutional(
            lambda: models.segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, num_classes=8
            ),
            "input",
        ),
        "maxvit": fixed(
            64, lambda: maxvit.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=8)
        ),
        "mnasnet0_5": convolutional(lambda: models.mnasnet0_5(num_classes=8)),
        "mobilenet_v2": convolutional(lambda: models.mobilenet_v2(width_mult=0.25, num_classes=8)),
        "mobilenet_v3_small": convolutional(
            lambda: models.mobilenet_v3_small(width_mult=0.25, num_classes=8)
        ),
        "r3d": (r3d, clip),
        "regnet": convolutional(
            lambda: regnet.RegNet(
                regnet.BlockParams.from_init_params(4, 16, 8.0, 2.0, 8, se_ratio=0.25),
                num_classes=8,
            )
        ),
        "resnet": convolutional(lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], 8)),
        "resnext": convolutional(
            lambda: resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], 8, groups=8, width_per_group=4)
        ),
        "shufflenet_v2_x0_5": convolutional(lambda: models.shufflenet_v2_x0_5(num_classes=8)),
        "squeezenet1_1": convolutional(lambda: models.squeezenet1_1(num_classes=8)),
        "swin": convolutional(
            lambda: swin(
                blocks.SwinTransformerBlock, torchvision.models.swin_transformer.PatchMerging
            )
        ),
        "swin_v2": convolutional(
            lambda: swin(blocks.SwinTransformerBlockV2, blocks.PatchMergingV2)
        ),
        "vgg11_bn_features": convolutional(
            lambda: models.vgg11_bn(num_classes=8).features, "input"
        ),
        "vit": fixed(32, lambda: models.VisionTransformer(32, 8, 1, 2, 32, 48, num_classes=8)),
    }


# --- diffusers --------------------------------------------------------------------------------------


def _diffusers() -> dict[str, Made]:
    import diffusers as d

    def latents(name: str, channels: int = 4, **more: Callable[[int, int], Any]) -> Inputs:
        return lambda batch, length: (
            {name: torch.randn(batch, channels, 2 * length, 2 * length)}
            | {key: value(batch, length) for key, value in more.items()}
        )

    def steps(batch: int, _: int) -> torch.Tensor:
        return torch.arange(batch)

    def words(width: int) -> Callable[[int, int], torch.Tensor]:
        return lambda batch, length: torch.randn(batch, length, width)

    def vectors(width: int) -> Callable[[int, int], torch.Tensor]:
        return lambda batch, _: torch.randn(batch, width)

    def classes(batch: int, _: int) -> torch.Tensor:
        return torch.arange(batch) % 8

    def flux(batch: int, length: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(batch, length, 4),
            "encoder_hidden_states": torch.randn(batch, length, 32),
            "pooled_projections": torch.randn(batch, 32),
            "timestep": torch.rand(batch),
            "img_ids": torch.zeros(length, 3),
            "txt_ids": torch.zeros(length, 3),
        }

    def ltx(batch: int, length: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(batch, length, 4),
            "encoder_hidden_states": torch.randn(batch, length, 16),
            "timestep": torch.rand(batch),
            "encoder_attention_mask": torch.ones(batch, length, dtype=torch.bool),
            "num_frames": 1,
            "height": length,
            "width": 1,
        }

    def video(batch: int, length: int) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(batch, 4, 1, length, length),
            "encoder_hidden_states": torch.randn(batch, length, 16),
            "timestep": torch.arange(batch),
        }

    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    crossed = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        **blocks,
    }
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
    coders = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        **blocks,
    }
    return {
        "AutoencoderKL": (lambda: d.AutoencoderKL(**coders), _image("sample")),
        "AutoencoderTiny": (
            lambda: d.AutoencoderTiny(
                encoder_block_out_channels=(8, 8),
                decoder_block_out_channels=(8, 8),
                num_encoder_blocks=(1, 1),
                num_decoder_blocks=(1, 1),
            ),
            _image("sample"),
        ),
        "AutoencoderOobleck": (
            lambda: d.AutoencoderOobleck(
                encoder_hidden_size=8,
                downsampling_ratios=[2, 4],
                decoder_channels=8,
                decoder_input_channels=4,
                audio_channels=2,
                channel_multiples=[1, 2],
            ),
            lambda batch, length: {"sample": torch.randn(batch, 2, 16 * length)},
        ),
        "ControlNetModel": (
            lambda: d.ControlNetModel(**crossed, conditioning_embedding_out_channels=(4, 8)),
            lambda batch, length: {
                **latents("sample", timestep=steps, encoder_hidden_states=words(16))(batch, length),
                "controlnet_cond": torch.randn(batch, 3, 4 * length, 4 * length),
            },
        ),
        "DiTTransformer2DModel": (
            lambda: d.DiTTransformer2DModel(
                **heads,
                in_channels=4,
                sample_size=8,
                patch_size=2,
                num_embeds_ada_norm=8,
                norm_num_groups=4,
            ),
            lambda batch, _: {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "timestep": torch.arange(batch),
                "class_labels": classes(batch, _),
            },
        ),
        "FluxTransformer2DModel": (
            lambda: d.FluxTransformer2DModel(
                **heads,
                patch_size=1,
                in_channels=4,
                num_single_layers=1,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
            ),
            flux,
        ),
        "LTXVideoTransformer3DModel": (
            lambda: d.LTXVideoTransformer3DModel(
                **heads, in_channels=4, out_channels=4, cross_attention_dim=32, caption_channels=16
            ),
            ltx,
        ),
        "PixArtTransformer2DModel": (
            lambda: d.PixArtTransformer2DModel(
                **heads,
                sample_size=8,
                patch_size=2,
                in_channels=4,
                cross_attention_dim=32,
                caption_channels=16,
                use_additional_conditions=False,
            ),
            lambda batch, length: {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "timestep": torch.arange(batch),
                "encoder_hidden_states": torch.randn(batch, length, 16),
                "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
            },
        ),
        "SanaTransformer2DModel": (
            lambda: d.SanaTransformer2DModel(
                **heads,
                patch_size=1,
                in_channels=4,
                out_channels=4,
                num_cross_attention_heads=2,
                cross_attention_head_dim=16,
                cross_attention_dim=32,
                caption_channels=16,
                sample_size=32,
            ),
            latents("hidden_states", timestep=steps, encoder_hidden_states=words(16)),
        ),
        "SD3Transformer2DModel": (
            lambda: d.SD3Transformer2DModel(
                **heads,
                sample_size=32,
                patch_size=1,
                in_channels=4,
                caption_projection_dim=32,
                joint_attention_dim=32,
                pooled_projection_dim=64,
                out_channels=4,
            ),
            latents(
                "hidden_states",
                timestep=steps,
                encoder_hidden_states=words(32),
                pooled_projections=vectors(64),
            ),
        ),
        "StableAudioDiTModel": (
            lambda: d.StableAudioDiTModel(
                **heads,
                sample_size=4,
                in_channels=4,
                num_key_value_attention_heads=2,
                out_channels=4,
                cross_attention_dim=16,
                time_proj_dim=8,
                global_states_input_dim=8,
                cross_attention_input_dim=16,
            ),
            lambda batch, length: {
                "hidden_states": torch.randn(batch, 4, length),
                "timestep": torch.rand(batch),
                "encoder_hidden_states": torch.randn(batch, length, 16),
                "global_hidden_states": torch.randn(batch, 1, 8),
            },
        ),
        "UNet1DModel": (
            lambda: d.UNet1DModel(
                block_out_channels=(32, 32, 64),
                in_channels=4,
                out_channels=4,
                norm_num_groups=4,
                layers_per_block=1,
                down_block_types=("DownBlock1D", "DownBlock1D", "DownBlock1D"),
                up_block_types=("UpBlock1D", "UpBlock1D", "UpBlock1D"),
                mid_block_type="UNetMidBlock1D",
                extra_in_channels=0,
            ),
            lambda batch, length: {
                "sample": torch.randn(batch, 4, 8 * length),
                "timestep": torch.arange(batch),
            },
        ),
        "UNet2DModel": (
            lambda: d.UNet2DModel(
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=4,
                **blocks,
            ),
            latents("sample", CHANNELS, timestep=steps),
        ),
        "UNet2DConditionModel": (
            lambda: d.UNet2DConditionModel(
                **crossed, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")
            ),
            latents("sample", timestep=steps, encoder_hidden_states=words(16)),
        ),
        "UNet3DConditionModel": (
            lambda: d.UNet3DConditionModel(
                down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
                cross_attention_dim=16,
                attention_head_dim=4,
                **blocks,
            ),
            lambda batch, length: {
                "sample": torch.randn(batch, 4, 2, 2 * length, 2 * length),
                "timestep": torch.arange(batch),
                "encoder_hidden_states": torch.randn(batch, length, 16),
            },
        ),
        "VQModel": (
            lambda: d.VQModel(**coders, latent_channels=4, num_vq_embeddings=32),
            _image("sample"),
        ),
        "WanTransformer3DModel": (
            lambda: d.WanTransformer3DModel(
                **heads,
                patch_size=(1, 2, 2),
                in_channels=4,
                out_channels=4,
                text_dim=16,
                freq_dim=32,
                ffn_dim=32,
                cross_attn_norm=True,
                rope_max_seq_len=32,
            ),
            video,
        ),
    }


# --- torch_geometric --------------------------------------------------------------------------------


def _graph(batch: int, length: int) -> dict[str, Any]:
    """A random graph: features of nodes, and which are joined."""
    nodes = batch * length
    return {"x": torch.randn(nodes, 8), "edge_index": torch.randint(nodes, (2, 3 * nodes))}


def _graphs(batch: int, length: int) -> dict[str, Any]:
    """Several graphs, with the graph of each node."""
    return _graph(batch, length) | {"batch": torch.arange(batch).repeat_interleave(length)}


def _molecules(batch: int, length: int) -> dict[str, Any]:
    graphs = _graphs(batch, length)
    return graphs | {"edge_attr": torch.randn(graphs["edge_index"].shape[1], 4)}


def _torch_geometric() -> dict[str, Made]:
    from torch_geometric import nn

    sizes = {"in_channels": 8, "hidden_channels": 16, "num_layers": 2, "out_channels": 4}
    pna = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
    deg = torch.tensor([1, 4, 8, 16, 8, 4])
    simple: dict[str, dict[str, Any]] = {
        "EdgeCNN": {},
        "GAT": {"heads": 2},
        "GCN": {},
        "GIN": {},
        "GraphSAGE": {},
        "PNA": pna | {"deg": deg},
    }

    def basic(name: str, more: dict[str, Any]) -> Made:
        return lambda: getattr(nn, name)(**sizes, **more), _graph

    return {
        **{name: basic(name, more) for name, more in simple.items()},
        "AttentiveFP": (
            lambda: nn.AttentiveFP(8, 16, 4, edge_dim=4, num_layers=2, num_timesteps=2),
            _molecules,
        ),
        "GATv2": (lambda: nn.GAT(**sizes, v2=True, heads=2), _graph),
        "GraphUNet": (lambda: nn.GraphUNet(8, 16, 4, depth=1), _graph),
        "MLP": (
            lambda: nn.MLP([8, 16, 4]),
            lambda batch, length: {"x": torch.randn(batch * length, 8)},
        ),
        "NeuralFingerprint": (lambda: nn.NeuralFingerprint(8, 16, 4, num_layers=2), _graphs),
        "PMLP": (lambda: nn.PMLP(**sizes), _graph),
        "RECT_L": (lambda: nn.RECT_L(8, 16), _graph),
        "SGFormer": (lambda: nn.SGFormer(8, 16, 4), _graphs),
        "TransformerConv": (lambda: nn.TransformerConv(8, 4, heads=2), _graph),
    }


MODELS: dict[str, Callable[[], dict[str, Made]]] = {
    "diffusers": _diffusers,
    "timm": lambda: {name: _timm(name) for name in TIMM.split()},
    "torch_geometric": _torch_geometric,
    "torchvision": _torchvision,
}
"""By library: the models by name, each as a function that makes it and one of a batch size and a length."""
