"""The models that benchmarks are made with: ResNet-50 and BERT-base, from torch.nn alone, and small
ones of their kind.

ResNet: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, with the stride
in the 3 x 3 convolution ("v1.5"), as everybody times it. BERT: Devlin, Chang, Lee, Toutanova,
"BERT: Pre-training of Deep Bidirectional Transformers", 2018, with both heads of its pre-training.
"""

import torch
from torch import nn

RESNET_50_PARAMETERS = 25_557_032
BERT_BASE_PARAMETERS = 110_106_428  # 109,482,240 of them without the heads of the pre-training


def convolution(inputs, outputs, size, stride=1):
    """Return a convolution that keeps the picture's size but for its stride, and the normalisation
    after it.
    """
    kernel = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """x + three convolutions of x, the middle one on a quarter of the channels."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.first = convolution(inputs, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x):
        y = self.first(x).relu_()
        y = self.second(y).relu_()
        return self.third(y).add_(self.shortcut(x)).relu_()


class ResNet(nn.Module):
    """ResNet-50 by its defaults; pictures (n, 3, height, width) in, (n, classes) out."""

    def __init__(self, blocks=(3, 4, 6, 3), width=64, classes=1000):
        super().__init__()
        layers = [convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classify = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures):
        return self.classify(self.features(pictures))


class Bert(nn.Module):
    """BERT-base by its defaults, with the heads of its pre-training.

    Takes token ids (n, length) and the places (n, m) whose words are asked for. Returns (n, m,
    vocabulary), of which the weights are those of the words' embedding, and (n, 2): whether the
    second sentence follows the first.
    """

    def __init__(self, layers=12, width=768, heads=12, vocabulary=30522, positions=512, dropout=0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.sentences = nn.Embedding(2, width)
        self.embedded = nn.Sequential(nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.word_bias = nn.Parameter(torch.zeros(vocabulary))
        self.follows = nn.Linear(width, 2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, asked):
        length = tokens.shape[1]
        second = (torch.arange(length, device=tokens.device) >= length // 2).long()  # the sentence of each place
        x = self.words(tokens) + self.places.weight[:length] + self.sentences(second)
        x = self.encoder(self.embedded(x))
        found = self.transform(x.gather(1, asked[..., None].expand(-1, -1, x.shape[2])))
        return nn.functional.linear(found, self.words.weight, self.word_bias), self.follows(self.pooler(x[:, 0]))


def count(model):
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
