// cpu/amx.cc with the instructions that few machines have done by emulation: tests only.
#define KVK_EMULATED 1
#include "cpu/amx.cc"
