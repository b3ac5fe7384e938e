"""Texts of everyday English that calibrate int8 where an operator gives none of their own.

Written for this purpose: questions, notes, descriptions, instructions and a few paragraphs, of 2 to 130 words.
"""

_PARAGRAPHS = """
Where is the nearest pharmacy?

thanks a lot

How do I reset the password of my account if I no longer have the phone number?

The ferry to the island leaves at 7:40 and returns at 18:15, except on Sundays.

Error 404: page not found

A young woman in a red raincoat walks two dogs along a quiet beach.

Please find attached the invoice for March. Payment is due within thirty days. If you have questions about single
items, reply to this message or call our office between nine and five.

What is the difference between a virus and a bacterium?

best headphones under 100 dollars

The committee met on Tuesday and agreed, after a long discussion, to postpone the vote until the new budget is known.
Two members asked that the minutes mention their objection. The next meeting is planned for the second week of June.

Preheat the oven to 180 degrees. Mix flour, sugar, butter and a pinch of salt until the dough is crumbly. Slice four
apples, put them into a dish with a little lemon juice and cinnamon, cover them with the crumbs, and bake for forty
minutes until the top is golden. Serve warm, with cream or vanilla ice cream.

is it safe to drink tap water in Lisbon

Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.

The river rose by two metres overnight.

My flight was cancelled and the airline offers only a voucher. Can I ask for my money back instead?

def mean(values): return sum(values) / len(values)

Rain is expected in the north, with gusts of up to 80 km/h on the coast.

The museum's new wing shows textiles from the twelfth century to today. Among them are a coronation cloak, fishing
nets, workers' aprons, and a parachute that was sewn into a wedding dress in 1946. Visitors may touch copies of the
fabrics, and on weekends weavers work at a loom in the entrance hall.

Two plus two is four.

She never answered the letter, but she kept it in a drawer for forty years.

Which programming language should a beginner learn first, and why?

Cheap, light, and it broke after a week. Would not buy again.

This little lamp is exactly what I wanted: warm light, a long cable, and a switch that I can find in the dark. It
arrived a day early and well packed. One star less because the instructions were only in pictures.

The patient is a 54-year-old man with chest pain that began two hours ago. He takes medicine for high blood pressure
and has no known allergies. Pulse 96, temperature 37.1. An electrocardiogram was made on arrival and again after
thirty minutes; a blood test is pending.

Shares of the company fell by 6.3 percent after it reported lower profits for the third quarter. Revenue grew slightly
to 4.1 billion, but costs of energy and transport rose faster. The chief executive said that prices would be raised in
spring, and that no plants would be closed. Analysts had expected a smaller loss; two banks lowered their targets.

Who painted the ceiling of the Sistine Chapel?

Meet me at the station, platform 3, at noon.

A train leaves the city at 60 miles per hour. Another leaves an hour later at 90. When does it catch up?

The tenant shall keep the premises in good repair and shall not make alterations without the written consent of the
landlord, which shall not be unreasonably withheld. On expiry of the term the tenant shall return all keys, remove all
personal property, and leave the premises clean. Deposits are returned within six weeks, less the cost of repairs for
which the tenant is responsible under this agreement.

GPU memory

Owls can turn their heads by as much as 270 degrees.

To install the package, create a virtual environment, activate it, and run pip install with the name of the package.
If a compiler is missing, the build stops with a message that names the header file it could not find.

The old lighthouse keeper climbed the hundred and twelve steps every evening, lit the lamp, wrote the weather into a
book with a green cover, and drank a cup of tea while the first ships passed. In all those years he had missed a single
night, when the storm of 1953 took the bridge and he had to watch the dark tower from the other shore. He spoke of it
rarely, and always as if it had been his own fault. When the light was made automatic he handed the book to the village
school, where children still read from it when the wind is strong, and moved into a house without a view of the sea.

A cat is asleep on the keyboard.

Does anyone know a good dentist near the university?

Water boils at a lower temperature in the mountains because the pressure of the air is lower.

I am writing to apply for the position of nurse that you advertised on 14 May. I have worked in a children's hospital
for six years, most of the time at night, and speak English, Polish and some Spanish.

the quick brown fox jumps over the lazy dog

Election results will be announced after midnight.

When the sample size is small, the confidence interval is wide, and a difference between two groups may be due to
chance alone. The authors report a mean improvement of 3.2 points (95 % interval from -0.4 to 6.8) and conclude that the
treatment works. Their own figures do not support this. A larger study, with the outcome fixed in advance, is needed
before the guideline is changed.

Flight LH 1823 to Munich is delayed by 45 minutes.

How long should I boil an egg so that the yolk stays soft?

Turn left after the bridge, pass the church, and park behind the blue house. The key is under the third flower pot.

It was neither the best film of the year nor the worst, but the music stayed with me for days.

A balanced binary search tree finds a key in logarithmic time. A hash table needs constant time on average, but it
keeps no order, so the question which key comes next cannot be answered without looking at all of them.

sourdough starter smells like vinegar

Mount Kilimanjaro is the highest mountain in Africa.

The bank will never ask for your PIN by telephone or e-mail.

In the first half the visitors defended with ten players and hardly left their own side. After the break they changed
their system, brought on two fast wingers, and scored twice within six minutes. The home team pushed forward, hit the
post, and was denied a penalty that the slow-motion pictures clearly showed. Five minutes from the end a long shot from
the captain went in under the bar. There were chances on both sides after that, but the score stayed at two to one, and
the visitors go into the return match with a lead that few people had thought possible.

Can I change the delivery address after I have placed an order?

Yes.

The battery lasts eleven hours if the screen is dim and the radio is off.

List three reasons why honey bees are important for farming.

We regret to inform you that your application was not successful.

The contract between the city and the bus company ends next year. Three firms have said that they will bid. Drivers
fear for their pensions, passengers for their routes, and the mayor for the price, which rose by a quarter last time.

A man plays an accordion in the subway while people hurry past.

42 degrees Celsius in Seville, the hottest day in June since records began

Before you open the case, switch off the device, unplug it, and wait ten minutes. Parts inside hold a charge. Remove
the four screws at the back, lift the cover, and disconnect the fan. Clean the filter with lukewarm water, never with
soap, and let it dry for a day. Put everything together in the reverse order and check that the light on the front is
green. If it blinks, the cover is not closed.

Why do leaves change colour in autumn?

Grandfather taught me to sharpen a knife, to read a map, and to say nothing when nothing needs to be said.

refund policy for digital goods

The satellite passes over the same place every sixteen days and takes pictures in eleven bands, from blue to infrared.

Gold fell to its lowest price in two months as the dollar gained.

Could you send me the slides from yesterday's talk on soil and climate? I missed the second half.
"""

TEXTS: tuple[str, ...] = tuple(
    " ".join(paragraph.split()) for paragraph in _PARAGRAPHS.strip().split("\n\n")
)
