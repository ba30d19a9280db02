// nccl.h includes this one and uses nothing of it.
#pragma once
