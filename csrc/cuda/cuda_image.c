/* A kernel file's fatbin as bytes of this library: compiled once for each line of images.def, with
 * SLIDE_IMAGE, the symbol slide_cuda_image_NAME, and SLIDE_FATBIN, the file. */
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

__asm__(".section .rodata\n"
        ".balign 64\n"
        ".globl " TEXT(SLIDE_IMAGE) "\n"
                                    ".hidden " TEXT(SLIDE_IMAGE) "\n" TEXT(
                                        SLIDE_IMAGE) ":\n"
                                                     ".incbin \"" SLIDE_FATBIN "\"\n"
                                                     ".previous\n");
