// Pages of mapped files.
#pragma once

#include <cstddef>

// Gives back the memory of the pages of a range, if they are those of a mapped file that nobody has
// written to; they are read again from the file if they are needed. Other memory stays.
void forget_file_pages(const void* data, size_t size);
