// llmc_machine_* of llmc.h.
#include "core/isa.h"
#include "llmc/llmc.h"

extern "C" {

uint32_t llmc_machine_get_isa_level(void) { return llmc::MachineIsaLevel(); }
void llmc_machine_limit_isa_level(uint32_t level) { llmc::LimitIsaLevel(level); }

}  // extern "C"
