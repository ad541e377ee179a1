// Stands in for the header of this name while the kernels run on a CPU.
#pragma once
#include "cuda_words.hpp"
