// OFFSET_OF is written by hand because NVRTC has no offsetof; its front end has a constant address instead.
#ifndef OFFSET_OF
#define OFFSET_OF(type, member) (unsigned long long)(__INTADDR__(&((type*)0)->member))
#endif
