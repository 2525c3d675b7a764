// Checks that a device is opened for as many ranks as an artifact has.
#pragma once
#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/status.h"

namespace llmc {

// collective: of the device; nullptr: it is alone.
Status CheckRankCount(const Artifact& artifact, const Collective* collective);

}  // namespace llmc
